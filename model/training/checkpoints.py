"""Writes the checkpoints of a run, and fills model and optimizer from one."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from model.checkpoint.steps import remove_steps, write_step
from model.training.job import Job
from model.training.moments import MOMENTS, give_moments, saved_tensors_of, step_counts
from model.training.report import say
from model.training.saved_run import SavedRun
from model.training.trainer import MOST_NAMED, Trainer
from vlshard import BoundPlan
from vlshard.comm import AgreedError, Group, agree
from vlshard.storage import Held, Key, held_entries, load_tensors, local_part


class Checkpoints:
    """The checkpoints of one run; all ranks call it alike.

    Attributes:
      last: step of the last one that was written, or that the run went on from.
      best: step of one that stays however many come after it, or None.
    """

    def __init__(
        self, job: Job, trainer: Trainer, record: Mapping[str, Any], of_model: frozenset[str]
    ) -> None:
        """Prepare.

        Args:
          job: whose settings name the folder.
          trainer: whose model and optimizer are saved.
          record: what run.json says of the run.
          of_model: parameters that are as --model has them; those of them that are frozen are
            not written.
        """
        assert job.settings.checkpoint is not None
        self._folder, self._job, self._trainer = job.settings.checkpoint, job, trainer
        self._record = record
        frozen = {n for n, p in trainer.model.named_parameters() if not p.requires_grad}
        self._without = sorted(frozen & of_model)
        self.last, self.best = job.reading.done, None
        if dist.get_rank() == 0:
            self._remove_old(self.last)  # a run may have been killed before it has
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._behind: Future[None] | None = None

    def due(self, step: int) -> bool:
        """Whether the settings ask for a checkpoint after a step."""
        every = self._job.settings.checkpoint_every
        return step == self._job.settings.steps or bool(every and step % every == 0)

    def save(self, *, anyway: bool = False) -> bool:
        """Write the checkpoint of the trainer's last step, if it is time to; a collective.

        Args:
          anyway: write it whether it is time to or not.
        Returns: whether it was written; one that is there is not written again.
        Raises: AgreedError on every rank if a value is not finite, or if it cannot be written, or
          the one that was written in the background could not be.
        """
        step = self._trainer.steps
        if step == self.last or not (anyway or self.due(step)):
            return False
        self.finish()
        start, group = time.monotonic(), self._job.patient
        tensors = saved_tensors_of(self._trainer.model, self._trainer.optimizer, self._without)
        refuse_not_finite(tensors, step, group)
        run = {
            **self._record,
            "position": self._job.reading.state(step),
            "unlabelled": self._trainer.unlabelled,
            "counts": step_counts(self._trainer.model, self._trainer.optimizer, group),
            "of_model": self._without,
        }
        bound = self._job.bound
        behind = self._job.settings.checkpoint_async and not anyway
        held = held_entries(tensors, bound.parts, bound.fused, copies=behind)
        self.last = step
        if behind:
            self._behind = self._pool.submit(self._write, step, held, run, start)
        else:
            self._write(step, held, run, start)
        return True

    def finish(self) -> None:
        """Wait for what is written in the background.

        Raises: AgreedError on every rank if it could not be written.
        """
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()

    def _write(
        self, step: int, held: Mapping[str, list[Held]], run: Mapping[str, Any], start: float
    ) -> None:
        """Write what was held after a step, and remove old ones; no two at a time."""
        written = write_step(self._folder, step, held, run, self._job.patient)
        if dist.get_rank() == 0:
            say(f"checkpoint written to {written} in {time.monotonic() - start:.1f} s")
            self._remove_old(step)

    def _remove_old(self, step: int) -> None:
        """Leave as many checkpoints up to a step as are kept."""
        if keep := self._job.settings.keep:
            remove_steps(self._folder, step, keep, self.best)


def restore(trainer: Trainer, bound: BoundPlan, saved: SavedRun, group: Group) -> None:
    """Fill parameters and moments from a checkpoint; a collective.

    Args:
      trainer: with its model in memory, before its first step.
      bound: the plan.
      saved: the checkpoint.
      group: of all ranks, that waits as long as loading may take.
    Raises: AgreedError on every rank that lists what does not fit.
    """
    give_moments(trainer.model, trainer.optimizer, saved.counts)
    tensors = saved_tensors_of(trainer.model, trainer.optimizer, saved.of_model)
    frozen = [name for name, p in trainer.model.named_parameters() if not p.requires_grad]
    spare = [Key(name, f".{moment}") for name in frozen for moment in MOMENTS]
    load_tensors(
        tensors, saved.folder, parts=bound.parts, fused=bound.fused, spare=spare, group=group
    )
    trainer.steps, trainer.unlabelled = saved.step, saved.run["unlabelled"]


def refuse_not_finite(tensors: Mapping[Any, torch.Tensor], step: int, group: Group) -> None:
    """Refuse to save values that are not finite; a collective.

    Raises: AgreedError on every rank that names them.
    """
    odd = [
        f"{key.name}{key.kind}"
        for key, tensor in tensors.items()
        if not bool(torch.isfinite(local_part(tensor)).all())
    ]
    names = sorted({name for told in agree(odd, group) for name in told})
    if names:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        text = f"values are not finite after step {step}: {', '.join(names[:MOST_NAMED])}{more}"
        raise AgreedError(text, notes=["no checkpoint is written of this step"])
