"""A whole training run: from settings to an exported model."""

import time
from contextlib import AbstractContextManager, nullcontext
from math import prod
from signal import Signals

import torch
import torch.distributed as dist
from torch import nn

from model.data import Batch, Loader
from model.training.build import build_model
from model.training.export import export
from model.training.interruption import Interruption, status_of
from model.training.job import Job, prepare
from model.training.journal import Journal
from model.training.record import StepRecord, kept_rows
from model.training.report import say, tell_launcher
from model.training.settings import Settings
from model.training.trainer import StepResult, Trainer
from vlshard import BoundPlan
from vlshard.comm import agree
from vlshard.storage import local_part


def train(settings: Settings, device: torch.device, interruption: Interruption) -> int:
    """Load, train, export; every rank calls it, with a process group up.

    A signal to any rank ends training after the step that all ranks are in, and what was trained is
    exported.

    Args:
      settings: the same on every rank.
      device: of this rank.
      interruption: notes the first signal of this rank.
    Returns: the exit status, the same on every rank.
    Raises: AgreedError on every rank for whatever is wrong with what the user gave.
    """
    job = prepare(settings, device)
    if signal := agreed_signal(interruption):
        return tell_stop(settings, signal, 0)
    trainer = Trainer(settings, build_model(settings, job, device), device, job.bound)
    tell_start(trainer.model, job.bound, settings)
    if signal := agreed_signal(interruption):
        return tell_stop(settings, signal, 0)
    with journal(settings) as log:
        signal = train_steps(settings, job, trainer, interruption, log)
        if log:
            log.close_display()
        trainer.check_weights()
        if trainer.unlabelled:
            tell(f"{trainer.unlabelled} of {trainer.steps} steps had no label and moved no weight")
        if settings.save:
            export(settings, job, trainer.model, trainer.steps)
            tell(f"exported to {settings.save}")
    if signal := signal or agreed_signal(interruption):
        return tell_stop(settings, signal, trainer.steps)
    return 0


def train_steps(
    settings: Settings,
    job: Job,
    trainer: Trainer,
    interruption: Interruption,
    log: Journal | None,
) -> int:
    """All steps, or those until a signal; its number, or 0."""
    group = dist.new_group(backend="gloo")
    with Loader(job.reading, job.rows, job.images, job.config, job.bound, group) as batches:
        start = time.perf_counter()
        for batch in batches:
            if settings.show_deal and batch.step == 1:
                tell("\n".join(map(job.bound.describe_deal, batch.headers)))
            found = trainer.step(batch, interruption.signal)
            now = time.perf_counter()
            if not batch.labels and trainer.unlabelled == 1:
                tell(f"step {batch.step} has no label: no weight moves; metrics count such steps")
            if log:
                log.add(record(batch, found, trainer.unlabelled, settings, now - start))
            if found.signal:
                return found.signal
            start = now
    dist.destroy_process_group(group)
    return 0


def agreed_signal(interruption: Interruption) -> int:
    """The signal that any rank has had, or 0; every rank calls it."""
    return max(agree(interruption.signal))


def tell(text: str) -> None:
    """Say something on rank 0."""
    if dist.get_rank() == 0:
        say(text)


def tell_stop(settings: Settings, signal: int, steps: int) -> int:
    """Say what a signal has cost; the exit status."""
    text = f"stopped by {Signals(signal).name} after step {steps} of {settings.steps}"
    if not steps:
        text = f"{text}: nothing was trained, nothing is written"
    elif settings.save:
        text = f"{text}: {settings.save} holds what was trained until then"
    else:
        text = f"{text}: what was trained is lost, as there is no --save"
    tell(text)
    tell_launcher(text)
    return status_of(signal)


def tell_start(model: nn.Module, bound: BoundPlan, settings: Settings) -> None:
    """Say how many parameters each rank stores, and how text is packed; every rank calls it."""
    stored = sum(local_part(parameter).numel() for parameter in model.parameters())
    ranks = ", ".join(f"{count:,}" for count in agree(stored))
    whole = sum(map(prod, bound.config.parameter_shapes().values()))  # splits cut the model's own
    tell(f"plan {settings.plan}: {whole:,} parameters, stored per rank {ranks}")
    if settings.pack:
        tell(f"packed: text.tokens is {bound.tokens}")


def record(
    batch: Batch, found: StepResult, unlabelled: int, settings: Settings, seconds: float
) -> StepRecord:
    """What the journal keeps of a step."""
    return StepRecord(
        step=batch.step,
        loss=found.loss,
        grad_norm=found.norm,
        lr=settings.lr_at(batch.step - 1),
        tokens=batch.tokens,
        labels=batch.labels,
        images=batch.images,
        seconds=seconds,
        vision_rows=kept_rows(batch.vision_rows),
        text_rows=kept_rows(batch.text_rows),
        unlabelled=unlabelled,
    )


def journal(settings: Settings) -> AbstractContextManager[Journal | None]:
    """The journal of rank 0; the other ranks have none."""
    if dist.get_rank():
        return nullcontext()
    return Journal(settings.steps, settings.metrics, settings.plot)
