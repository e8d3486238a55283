"""A whole training run: from settings to an exported model."""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import prod
from secrets import token_hex
from signal import Signals

import torch
import torch.distributed as dist

from model.checkpoint import has_weights
from model.data import Batch, Loader
from model.training.account import Account
from model.training.build import fill_model, make_model
from model.training.check_data import BAD_DATA, check_data
from model.training.checkpoints import Checkpoints, restore
from model.training.evaluation import Evaluator
from model.training.export import export
from model.training.interruption import Interruption, status_of
from model.training.job import Job, prepare
from model.training.journal import Journal
from model.training.metrics_file import RunHead
from model.training.overview import first_lines, step_lines
from model.training.profiling import Profiler
from model.training.report import say, tell_launcher
from model.training.saved_run import run_record
from model.training.settings import Settings
from model.training.trainer import Trainer
from vlshard.comm import AgreedError, agree
from vlshard.plan import plan_text


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
    settings = job.settings
    if signal := agreed_signal(interruption):
        return tell_stop(settings, signal, 0)
    if settings.check_data and check_data(job) and not settings.skip_bad:
        return BAD_DATA
    model = make_model(settings, job, device)
    run = job.saved.id if job.saved else agree(token_hex(4))[0]
    tell("\n".join(first_lines(settings, job, model, run)))
    if settings.dry_run:
        return plan_step(job)
    with interruption.waiting("weights were read"):
        fill_model(settings, job, model, device)
    trainer = Trainer(settings, model, device, job.bound)
    if job.saved:
        with interruption.waiting("a checkpoint was read"):
            restore(trainer, job.bound, job.saved, job.patient)
    checkpoints = checkpoints_of(job, trainer, run) if settings.checkpoint else None
    if signal := agreed_signal(interruption):
        return tell_stop(settings, signal, 0)
    rows = job.evaluated
    evaluator = Evaluator(settings, job, rows, model, device) if rows else None
    with journal(settings, run_head(settings, job, run), trainer.steps) as log:
        signal = train_steps(settings, job, trainer, interruption, log, evaluator, checkpoints)
        if log:
            log.close_display()
        if checkpoints:
            with interruption.waiting("a checkpoint was written"):
                checkpoints.finish()
        trainer.check_weights()
        if trainer.unlabelled:
            tell(f"{trainer.unlabelled} of {trainer.steps} steps had no label and moved no weight")
        exports = settings.save and not (checkpoints and trainer.steps < settings.steps)
        if exports:
            with interruption.waiting("the model was exported"):
                export(settings, job, trainer.model, trainer.steps)
    tell_end(settings, log, evaluator, trainer.steps)
    if evaluator:
        evaluator.close()
    signal = signal or agreed_signal(interruption)
    if signal or trainer.steps < settings.steps:
        return tell_stop(settings, signal, trainer.steps)
    return 0


def plan_step(job: Job) -> int:
    """Read and plan the first step, and say what each rank would compute; the exit status."""
    group = dist.new_group(backend="gloo")
    reading = replace(job.reading, steps=job.reading.done + 1)
    with Loader(reading, job.rows, job.images, job.config, job.bound, group) as batches:
        tell("\n".join(step_lines(job.bound, next(iter(batches)))))
    tell("dry run: nothing was trained, nothing is written")
    return 0


def train_steps(
    settings: Settings,
    job: Job,
    trainer: Trainer,
    interruption: Interruption,
    log: Journal | None,
    evaluator: Evaluator | None = None,
    checkpoints: Checkpoints | None = None,
) -> int:
    """The steps that are left, with evaluations and checkpoints between.

    Returns: number of the signal that ended them, or 0.
    """
    if settings.stop_after and trainer.steps >= settings.stop_after:
        return 0
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout))
    skip = settings.skip_bad
    loader = Loader(job.reading, job.rows, job.images, job.config, job.bound, group, skip_bad=skip)
    with Profiler(settings.profile, settings.profile_dir) as profiler, loader as batches:
        account, start = Account(job, trainer), time.perf_counter()
        for batch in kept_batches(batches, checkpoints):
            came = time.perf_counter()
            if settings.show_deal and batch.step == 1:
                tell("\n".join(map(job.bound.describe_deal, batch.headers)))
            profiler.before(batch.step)
            found = trainer.step(batch, interruption.signal)
            profiler.after(batch.step)
            now = time.perf_counter()
            if not batch.labels and trainer.unlabelled == 1:
                tell(f"step {batch.step} has no label: no weight moves; metrics count such steps")
            if log:
                log.add(account.record(batch, found, now - start, came - start))
            signal = found.signal or evaluated(batch.step, evaluator, interruption, log)
            stopped = bool(signal) or batch.step == settings.stop_after
            with interruption.waiting("a checkpoint was written"):
                saved = checkpoints is not None and checkpoints.save(anyway=stopped)
            if stopped:
                tell_skipped(loader)
                return signal
            paused = saved or (evaluator is not None and evaluator.due(batch.step))
            start = time.perf_counter() if paused else now
    dist.destroy_process_group(group)
    tell_skipped(loader)
    return 0


def kept_batches(batches: Iterable[Batch], checkpoints: Checkpoints | None) -> Iterator[Batch]:
    """The batches; where one cannot be read, a checkpoint of the step before is written first."""
    try:
        for batch in batches:
            if batch.skipped:
                tell(f"step {batch.step}: {len(batch.skipped)} rows cannot be used and are skipped")
            yield batch
    except AgreedError as error:
        if checkpoints is None or not checkpoints.save(anyway=True):
            raise
        note = f"a checkpoint of step {checkpoints.last} is written: --resume auto goes on from it"
        raise AgreedError(str(error), notes=[note]) from error


def tell_skipped(loader: Loader) -> None:
    """List on rank 0 the rows that were skipped; every rank calls it."""
    told = {(row, text) for found in agree([*loader.faults.items()]) for row, text in found}
    for _, text in sorted(told):
        tell(f"skipped: {text}")


def evaluated(
    step: int, evaluator: Evaluator | None, interruption: Interruption, log: Journal | None
) -> int:
    """Evaluate after a step, if it is time to; the number of a signal that broke it off, or 0."""
    if evaluator is None or not evaluator.due(step):
        return 0
    found, signal = evaluator.evaluate(step, interruption)
    if log and found:
        log.add_evaluation(found)
    return signal


def agreed_signal(interruption: Interruption) -> int:
    """The signal that any rank has had, or 0; every rank calls it."""
    return max(agree(interruption.signal))


def tell(text: str) -> None:
    """Say something on rank 0."""
    if dist.get_rank() == 0:
        say(text)


def checkpoints_of(job: Job, trainer: Trainer, run: str) -> Checkpoints:
    """Where the run's checkpoints go, and what they say of it."""
    names = [name for name, _ in trainer.model.named_parameters()]
    of_model = frozenset(names) if has_weights(job.settings.model) else frozenset[str]()
    record = run_record(
        job.settings,
        job.config,
        job.rows,
        run=run,
        ranks=dist.get_world_size(),
        plan=plan_text(job.settings.plan),
        cost=job.bound.cost if job.settings.measure_cost else None,
    )
    of_model = job.saved.of_model if job.saved else of_model
    return Checkpoints(job, trainer, record, of_model)


def tell_end(
    settings: Settings, log: Journal | None, evaluator: Evaluator | None, steps: int
) -> None:
    """Say on rank 0 what was written where."""
    if evaluator and evaluator.best:
        best = evaluator.best
        tell(f"best evaluation: loss {best.eval_loss:.4f} after step {best.step}")
    for what, path in (log.written if log else {}).items():
        tell(f"{what} written to {path}")
    if settings.profile and settings.profile[1] <= steps:
        tell(f"traces written to {settings.profile_dir}, one a rank")
    if settings.save and not (settings.checkpoint and steps < settings.steps):
        tell(f"model exported to {settings.save}")


def tell_stop(settings: Settings, signal: int, steps: int) -> int:
    """Say where a run has stopped, and what that has cost; the exit status."""
    by = f"by {Signals(signal).name} " if signal else ""
    text = f"stopped {by}after step {steps} of {settings.steps}"
    if settings.checkpoint and steps:
        text = f"{text}: its checkpoint is in {settings.checkpoint}, --resume auto goes on from it"
    elif not steps:
        text = f"{text}: nothing was trained, nothing is written"
    elif settings.save:
        text = f"{text}: {settings.save} holds what was trained until then"
    else:
        text = f"{text}: what was trained is lost, as there is no --save"
    tell(text)
    tell_launcher(text, status_of(signal))
    return status_of(signal)


def run_head(settings: Settings, job: Job, run: str) -> RunHead:
    """What tells this run from others, in its metrics."""
    return RunHead(
        run=run,
        plan=settings.plan,
        ranks=job.bound.mesh.size,
        parameters=sum(map(prod, job.config.parameter_shapes().values())),
        steps=settings.steps,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def journal(
    settings: Settings, head: RunHead, after: int
) -> AbstractContextManager[Journal | None]:
    """The journal of rank 0, which goes on after a step; the other ranks have none."""
    if dist.get_rank():
        return nullcontext()
    files = settings.metrics, settings.plot, settings.tensorboard
    return Journal(settings.steps, *files, head=head, after=after)
