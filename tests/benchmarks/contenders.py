"""One optimizer step of each contender: this project under a plan, or transformers."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from model.config.config import Config
from model.data.inputs import ModelInputs, build_inputs, plan_step
from model.data.sample import Sample
from model.modules.qwen3_vl_moe import Qwen3VLMoe
from tests.benchmarks.workloads import BATCH, CLIP, OPTIMIZER, Drawn, Workload, draw_sample, weight
from tests.training import own_part
from vlshard.plan.header import SampleFacts, make_headers
from vlshard.plan.plan import load_plan
from vlshard.plan.step_boundaries import StepBoundaries
from vlshard.storage.norm import clip_gradients
from vlshard.storage.parts import Parts
from vlshard.storage.shard_model import shard_model


@torch.no_grad()
def set_weights(model: nn.Module, parts: Parts | None = None) -> None:
    """Give every parameter its first value, or this rank's part of it."""
    parts = parts or Parts()
    for name, parameter in model.named_parameters():
        whole = own_part(name, weight(name, parts.whole_shape(name, parameter.shape)), parts)
        if isinstance(parameter, DTensor):
            placed = (parameter.device_mesh, parameter.placements)
            whole = distribute_tensor(whole, *placed, src_data_rank=None)
        parameter.copy_(whole)


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

    def step(self, prepared: tuple[StepBoundaries, ModelInputs]) -> Tensor:
        """Zero, forward, backward, clip, update; returns the loss summed over ranks."""
        at, inputs = prepared
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.model(inputs, at)
        loss.backward()
        clip_gradients(self.model.parameters(), CLIP, self._counted)
        self._optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total


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


class Transformers:
    """transformers' model in one process, under DDP or under FSDP2."""

    def __init__(self, workload: Workload, mode: str) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.Qwen3VLMoeConfig(**workload.raw)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = transformers.Qwen3VLMoeForConditionalGeneration(config).train()
        if mode == "fsdp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for unit in (*model.model.language_model.layers, *model.model.visual.blocks, model):
                fully_shard(unit, mesh=mesh)
        model.to_empty(device="cpu")
        set_weights(model)
        for module in model.modules():
            if hasattr(module, "original_inv_freq"):
                plain = next(
                    c for c in type(module).__mro__ if c.__name__.endswith("RotaryEmbedding")
                )
                module.inv_freq.copy_(plain(module.config).inv_freq)
                module.original_inv_freq.copy_(module.inv_freq)
        self._workload, self.model = workload, model
        self._net = DistributedDataParallel(model) if mode == "ddp" else model
        self._optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)

    def prepare(self, step: int) -> list[dict[str, Tensor]]:
        """This rank's samples of a step, one a forward."""
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = range(rank * BATCH // world, (rank + 1) * BATCH // world)
        return [self._inputs(draw_sample(self._workload, step * BATCH + i)) for i in mine]

    def _inputs(self, drawn: Drawn) -> dict[str, Tensor]:
        ids = torch.tensor([drawn.ids])
        return {
            "input_ids": ids,
            "mm_token_type_ids": (ids == self._workload.ids["image"]).int(),
            "labels": torch.tensor([drawn.labels]),
            "pixel_values": drawn.pixels,
            "image_grid_thw": torch.tensor(drawn.grids),
        }

    def step(self, prepared: list[dict[str, Tensor]]) -> Tensor:
        """Zero, forward, backward, clip, update; returns the mean loss over ranks."""
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for inputs in prepared:
            loss = self._net(**inputs, use_cache=False).loss / len(prepared)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        dist.all_reduce(total)
        return total / dist.get_world_size()


def contender(name: str, workload: Workload) -> UnderPlan | Transformers:
    """By name: ``hf ddp``, ``hf fsdp``, or a plan of ``plans/``."""
    makers: dict[str, Callable[[], UnderPlan | Transformers]] = {
        "hf ddp": lambda: Transformers(workload, "ddp"),
        "hf fsdp": lambda: Transformers(workload, "fsdp"),
    }
    return makers.get(name, lambda: UnderPlan(workload, name))()
