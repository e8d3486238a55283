"""Train a Qwen3-VL-MoE from files, under a plan, on one rank or many.

``torchrun --nproc-per-node 2 examples/train.py --plan plans/vision_cp_ulysses.py --model DIR
--data FILE.jsonl --steps 100 --batch 8 --save OUT``; without torchrun it is one process.
"""

import fnmatch
import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from examples.launch import INTERRUPTED, Interruption, join_ranks, run
from examples.options import Settings
from examples.progress import Journal, StepRecord, check_picture
from model.checkpoint import (
    CheckpointError,
    check_checkpoint,
    check_target,
    has_weights,
    load_checkpoint,
    save_checkpoint,
)
from model.config import Config, ConfigError, load_config
from model.data import DATA_ERRORS, Batch, ImageReader, Loader, ModelInputs, Reading, RowFile
from model.modules import Qwen3VLMoe, fill, refuse_expert_widths
from model.training import keep_cost, kept_cost, measure_cost
from vlshard import BoundPlan, ShardError, load_plan, shard_model
from vlshard.comm import AgreedError, agree, together
from vlshard.language import nearest
from vlshard.pytree import tree_map
from vlshard.storage import clip_gradients, grad_norm, local_part

KNOWN_ERRORS = (*DATA_ERRORS, ConfigError, CheckpointError)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> int:
    """Train as the command line says; returns the exit status."""
    settings = Settings.from_command_line()
    interruption = Interruption()
    interruption.install()
    return train(settings, join_ranks(settings.device), interruption)


def train(settings: Settings, device: torch.device, interruption: Interruption) -> int:
    """Load, train, save; every rank calls it, with a process group up.

    Args:
      settings: the same on every rank.
      device: of this rank.
      interruption: true once this rank is asked to stop.
    Returns: the exit status, the same on every rank.
    Raises: AgreedError on every rank for whatever is wrong with what the user gave.
    """
    job = prepare(settings, device)
    trainer = Trainer(settings, build_model(settings, job, device), device)
    tell_start(trainer.model, job.bound, settings)
    group = dist.new_group(backend="gloo")
    with (
        journal(settings) as log,
        Loader(job.reading, job.rows, job.images, job.config, job.bound, group) as batches,
    ):
        start = time.perf_counter()
        for batch in batches:
            if settings.show_deal and batch.step == 1 and dist.get_rank() == 0:
                print(*map(job.bound.describe_deal, batch.headers), sep="\n", flush=True)
            loss, norm, stopped = trainer.step(batch, bool(interruption))
            now = time.perf_counter()
            if log:
                log.add(record(batch, loss, norm, settings, now - start))
            if stopped:
                return INTERRUPTED
            start = now
    dist.destroy_process_group(group)
    if settings.save:
        export(settings, job, trainer.model)
    return 0


def tell_start(model: nn.Module, bound: BoundPlan, settings: Settings) -> None:
    """Say how many parameters each rank stores, and how text is packed; every rank calls it."""
    stored = sum(local_part(parameter).numel() for parameter in model.parameters())
    by_rank = agree(stored)
    if dist.get_rank() == 0:
        whole = sum(parameter.numel() for parameter in model.parameters())
        ranks = ", ".join(f"{count:,}" for count in by_rank)
        print(f"plan {settings.plan}: {whole:,} parameters, stored per rank {ranks}", flush=True)
        if settings.pack:
            print(f"packed: text.tokens is {bound.tokens}", flush=True)


@dataclass(frozen=True)
class Job:
    """What the settings name, read and checked."""

    config: Config
    bound: BoundPlan
    rows: RowFile
    images: ImageReader
    reading: Reading


def prepare(settings: Settings, device: torch.device) -> Job:
    """Read and check everything but the weights; nothing of the model is allocated yet."""
    with together(*KNOWN_ERRORS):
        config = load_config(settings.model)
        plan = load_plan(settings.plan, dist.get_world_size())
        images = ImageReader(settings.model, config)
        rows = RowFile(settings.data, settings.model, config, images)
        if has_weights(settings.model):
            check_checkpoint(settings.model, config, settings.expert_layout)
        prepare_outputs(settings)
    if settings.measure_cost:
        plan = replace(plan, cost=measured_cost(config, settings, device))
    with together(*KNOWN_ERRORS):
        bound = plan.bind(config, dist.get_world_size())
        if settings.pack:
            bound = plan.packed().bind(config, dist.get_world_size())
    reading = Reading(
        num_rows=len(rows),
        batch=settings.batch,
        steps=settings.steps,
        micro_batch=settings.micro_batch,
        seed=settings.seed,
        shuffle=settings.shuffle,
    )
    return Job(config, bound, rows, images, reading)


def measured_cost(config: Config, settings: Settings, device: torch.device) -> tuple[float, float]:
    """What a frame costs on rank 0, now or when the model was saved; every rank gets the same."""
    mine = None
    with together(*KNOWN_ERRORS, RuntimeError):
        if dist.get_rank() == 0:
            kept = kept_cost(settings.model)
            mine = kept or measure_cost(config, device, DTYPES[settings.dtype])
            words = "as saved with the model" if kept else "measured now"
            told = f"{mine[0]:.3g} n^2 + {mine[1]:.3g} n seconds, {words}"
            print(f"a frame of n patches costs {told}", flush=True)
    a, b = agree(mine)[0]
    return a, b


def prepare_outputs(settings: Settings) -> None:
    """Make the folders of what rank 0 writes; refuse to export over what is no export."""
    if settings.save:
        check_target(settings.save)
    for path in (settings.save, settings.metrics, settings.plot):
        if path and dist.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
    if settings.metrics and dist.get_rank() == 0:
        settings.metrics.open("a").close()
    if settings.plot and dist.get_rank() == 0:
        check_picture(settings.plot)


def build_model(settings: Settings, job: Job, device: torch.device) -> nn.Module:
    """The model as the plan stores it, with the folder's weights or new ones."""
    with together(*KNOWN_ERRORS, ValueError), torch.device("meta"):
        refuse_expert_widths(job.config, DTYPES[settings.dtype])
        model = Qwen3VLMoe(job.config, job.bound.checkpoint)
        freeze(model, settings.freeze)
    shard_model(
        model,
        job.bound.storages,
        job.bound.mesh,
        lookups=job.config.lookups(),
        compute_dtype=DTYPES[settings.dtype],
        device_type=device.type,
    )
    model.to_empty(device=device)
    with together(*KNOWN_ERRORS):
        if has_weights(settings.model):
            load_checkpoint(model, settings.model, job.config, settings.expert_layout)
        else:
            fill(model, job.config, settings.seed)
    return model


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Take the parameters whose names match a pattern out of training."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ShardError(f"--freeze {pattern!r} matches no parameter{nearest(pattern, names)}")
        for name in matches:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ShardError("--freeze leaves no parameter to train")


class Trainer:
    """Optimizer steps on one model; the same numbers come out on every rank."""

    def __init__(self, settings: Settings, model: nn.Module, device: torch.device) -> None:
        """Make the optimizer, over the parameters that are not frozen."""
        self.model, self._settings, self._device = model, settings, device
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=settings.lr,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=settings.weight_decay,
            fused=device.type in ("cpu", "cuda"),
        )
        self._last = "no step was finished before it"

    def step(self, batch: Batch, stop: bool) -> tuple[float, float, bool]:
        """One optimizer step.

        Args:
          batch: this rank's part of it.
          stop: whether this rank is asked to stop.
        Returns: the loss over the global batch, the gradient norm before clipping, and whether
          any rank is asked to stop.
        Raises: AgreedError on every rank, before any weight moves, if loss or norm is not finite.
        """
        self._optimizer.zero_grad(set_to_none=True)
        loss, stopped = self._forward_backward(batch, stop)
        self._check("loss", loss, batch.step)
        norm = float(self._clip())
        self._check("gradient norm", norm, batch.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr_at(batch.step - 1)
        self._optimizer.step()
        self._last = f"step {batch.step} had loss {loss:.6g} and gradient norm {norm:.6g}"
        return loss, norm, stopped

    def _forward_backward(self, batch: Batch, stop: bool) -> tuple[float, bool]:
        """Add up gradients over micro-batches; the loss is summed over ranks apart from them."""
        told = torch.tensor([0.0, float(stop)], device=self._device)
        for part in batch.parts:
            loss = self.model(to_device(part.inputs, self._device), part.at)
            told[0] += loss.detach()
            if loss.requires_grad:
                loss.backward()
        dist.all_reduce(told)
        total, stops = told.tolist()
        return total, stops > 0

    def _clip(self) -> torch.Tensor:
        if self._settings.clip:
            return clip_gradients(self._trained, self._settings.clip)
        return grad_norm(self._trained)

    def _check(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise AgreedError(f"{name} is {value} at step {step}", notes=[self._last])


def to_device(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    """The inputs where the model is; the loader makes them on the host."""
    return tree_map(lambda x: None if x is None else x.to(device, non_blocking=True), inputs)


def record(
    batch: Batch, loss: float, norm: float, settings: Settings, seconds: float
) -> StepRecord:
    """What the journal keeps of a step."""
    return StepRecord(
        step=batch.step,
        loss=loss,
        grad_norm=norm,
        lr=settings.lr_at(batch.step - 1),
        tokens=batch.tokens,
        images=batch.images,
        seconds=seconds,
        vision_rows=batch.vision_rows,
        text_rows=batch.text_rows,
    )


def journal(settings: Settings) -> AbstractContextManager[Journal | None]:
    """The journal of rank 0; the other ranks have none."""
    if dist.get_rank():
        return nullcontext()
    return Journal(settings.steps, settings.metrics, settings.plot)


def export(settings: Settings, job: Job, model: nn.Module) -> None:
    """Write a Hugging Face folder, and the measured cost with it; every rank takes part."""
    with together(*KNOWN_ERRORS):
        save_checkpoint(
            model,
            settings.save,
            job.config,
            source=settings.model,
            expert_layout=settings.expert_layout,
        )
    with together(OSError):
        if settings.measure_cost and dist.get_rank() == 0:
            keep_cost(settings.save, job.bound.cost)


if __name__ == "__main__":
    run(main)
