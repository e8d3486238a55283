"""A whole training run: from settings to an exported model."""

import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from model.data import Batch, Loader
from model.training.build import build_model
from model.training.export import export
from model.training.interruption import INTERRUPTED, Interruption
from model.training.job import prepare
from model.training.journal import Journal
from model.training.record import StepRecord, kept_rows
from model.training.settings import Settings
from model.training.trainer import Trainer
from vlshard import BoundPlan
from vlshard.comm import agree
from vlshard.storage import local_part


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
        vision_rows=kept_rows(batch.vision_rows),
        text_rows=kept_rows(batch.text_rows),
    )


def journal(settings: Settings) -> AbstractContextManager[Journal | None]:
    """The journal of rank 0; the other ranks have none."""
    if dist.get_rank():
        return nullcontext()
    return Journal(settings.steps, settings.metrics, settings.plot)
