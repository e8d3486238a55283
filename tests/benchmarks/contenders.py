"""One optimizer step of each contender: this project under a plan, or transformers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from model.config.config import Config
from model.data.inputs import ModelInputs, build_inputs, plan_step
from model.data.sample import Sample
from model.modules.qwen3_vl_moe import Qwen3VLMoe
from tests.benchmarks.weights import set_weights, whole
from tests.benchmarks.with_transformers import MODES, Transformers
from tests.benchmarks.workloads import BATCH, CLIP, OPTIMIZER, Drawn, Workload, draw_sample
from vlshard.plan.header import SampleFacts, make_headers
from vlshard.plan.plan import load_plan
from vlshard.plan.step_boundaries import StepBoundaries
from vlshard.storage.norm import clip_gradients
from vlshard.storage.shard_model import shard_model


class UnderPlan:
    """This project's model under one of its plans."""

    def __init__(self, workload: Workload, plan: str) -> None:
        self._workload, self._config = workload, Config.from_dict(workload.raw)
        world = dist.get_world_size()
        self.bound = load_plan(f"plans/{plan}.py", world).bind(self._config, world)
        with torch.device("meta"):
            self.model = Qwen3VLMoe(self._config, self.bound.checkpoint)
        shard_model(
            self.model,
            self.bound.storages,
            self.bound.mesh,
            parts=self.bound.parts,
            lookups=self.bound.config.lookups(),
        )
        self.model.to_empty(device="cpu")
        set_weights(self.model, self.bound.parts)
        self._counted = [self.bound.counts(name) for name, _ in self.model.named_parameters()]
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIMIZER)

    def prepare(self, step: int) -> tuple[StepBoundaries, ModelInputs]:
        """What the loader gives a step, made apart from it."""
        drawn = [draw_sample(self._workload, step * BATCH + i) for i in range(BATCH)]
        facts = [self._facts(i, sample) for i, sample in enumerate(drawn)]
        (header,) = make_headers(facts, self.bound.data_ranks)
        share = self.bound.share(header, dist.get_rank())
        samples = {
            i: Sample(np.array(d.ids), np.array(d.labels), d.grids) for i, d in enumerate(drawn)
        }
        pixels = {
            (i, number): part
            for i, d in enumerate(drawn)
            for number, part in enumerate(d.pixels.split([t * h * w for t, h, w in d.grids]))
        }
        inputs = build_inputs(header, share, samples, pixels, self._config)
        table = torch.stack([positions(d, self._workload) for d in drawn], dim=1)
        samples_in, places_in = share.entered_tokens or (share.samples, share.positions)
        held = table[:, samples_in, np.minimum(places_in, table.shape[2] - 1)]
        inputs = replace(inputs, text=replace(inputs.text, positions=held))
        return plan_step(self.bound, header, inputs)

    def _facts(self, row: int, drawn: Drawn) -> SampleFacts:
        labelled = sum(label >= 0 for label in drawn.labels[1:])
        starts = drawn.starts(self._workload)
        return SampleFacts(row, len(drawn.ids), labelled, drawn.grids, starts)

    def compute(self, prepared: tuple[StepBoundaries, ModelInputs]) -> Tensor:
        """Zero, forward, backward; returns this rank's term of the loss."""
        at, inputs = prepared
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.model(inputs, at)
        loss.backward()
        return loss.detach().clone()

    def update(self) -> None:
        """Clip and update."""
        clip_gradients(self.model.parameters(), CLIP, self._counted)
        self._optimizer.step()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's gradient, whole; a collective."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, self.bound.parts.gather(name, whole(parameter.grad))


def positions(drawn: Drawn, workload: Workload) -> Tensor:
    """Positions [3, tokens] as transformers gives them to pictures of several frames too.

    Such a picture is one run: its frames count up in time and share rows and columns.
    """
    merge = workload.vision["spatial_merge_size"]
    parts: list[Tensor] = []
    at = 0
    for gap, grid in zip(workload.gaps, (*drawn.grids, None), strict=True):
        words = gap + (1 if parts else 0) + (1 if grid else 0)
        parts.append((torch.arange(words) + at).expand(3, -1))
        at += words
        if grid:
            t, h, w = grid[0], grid[1] // merge, grid[2] // merge
            axes = torch.meshgrid(*map(torch.arange, (t, h, w)), indexing="ij")
            parts.append(torch.stack(axes).flatten(1) + at)
            at += max(h, w)
    rest = len(drawn.ids) - sum(part.shape[1] for part in parts)
    parts.append((torch.arange(rest) + at).expand(3, -1))
    return torch.cat(parts, dim=1)


def contender(name: str, workload: Workload) -> UnderPlan | Transformers:
    """By name: a mode of transformers' model, or a plan of ``plans/``."""
    return Transformers(workload, MODES[name]) if name in MODES else UnderPlan(workload, name)


def step(running: UnderPlan | Transformers, prepared: Any) -> Tensor:
    """One optimizer step; returns the loss, summed over ranks."""
    term = running.compute(prepared)
    running.update()
    dist.all_reduce(term)
    return term
