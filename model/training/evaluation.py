"""Loss and accuracy on rows that are not trained on, under the plan, as training computes them."""

import math
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from model.data import Batch, Loader, RowFile
from model.loss import CHUNK, row_parts
from model.training.interruption import Interruption
from model.training.job import DTYPES, Job
from model.training.record import EvalRecord
from model.training.settings import Settings
from model.training.trainer import sum_over_ranks, to_device
from vlshard import Boundaries
from vlshard.comm import AgreedError


@dataclass(frozen=True)
class OnePass:
    """Which rows each step takes of data that is read once, in file order.

    Attributes:
      num_rows: rows of the data.
      batch: rows of a step over all ranks; the last one has what is left.
      micro_batch: rows per data-parallel rank and forward; None is all of a step's.
    """

    num_rows: int
    batch: int
    micro_batch: int | None = None

    @property
    def done(self) -> int:
        """Steps that were done before: none."""
        return 0

    @property
    def steps(self) -> int:
        """Number of steps."""
        return -(-self.num_rows // self.batch)

    def rows(self, step: int) -> tuple[int, ...]:
        """Rows of a step (counted from 0), in global order."""
        return tuple(range(step * self.batch, min((step + 1) * self.batch, self.num_rows)))


class Scores:
    """A loss for ``Qwen3VLMoe.forward``: cross entropy, and beside it how many tokens are right.

    Attributes:
      right: rows so far whose target has the largest logit, divided as the loss is; fp32.
    """

    def __init__(self, device: torch.device) -> None:
        self.right = torch.zeros((), device=device)

    def __call__(
        self,
        hidden: Float[Tensor, "z m"],
        head_w: Float[Tensor, "vocab m"],
        targets: Int[Tensor, " z"],
        num_labels: Float[Tensor, ""],
        *,
        at: Boundaries,
    ) -> Float[Tensor, ""]:
        """The term that ``token_loss`` gives, without a backward; args as there."""
        total = hidden.new_zeros((), dtype=torch.float32)
        for rows, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            if len(rows):
                logits = F.linear(rows, head_w).float()
                parts = row_parts(logits, at.columns("text.vocab", wanted))
                norms, target = at.merge("text.vocab", parts).unbind(-1)
                total += norms.sum() - target.sum()
                self.right += (at.argmax("text.vocab", logits) == wanted).sum() / num_labels
        return total / num_labels


class Evaluator:
    """Evaluates a model under a plan; every rank calls it alike.

    Attributes:
      best: the evaluation with the lowest loss so far; a run that goes on sets it.
    """

    def __init__(
        self, settings: Settings, job: Job, rows: RowFile, model: nn.Module, device: torch.device
    ) -> None:
        """Remember what is evaluated, on what.

        Args:
          settings: of the run.
          job: what is trained.
          rows: those to evaluate on; there may be fewer than ranks.
          model: stored as its plan says.
          device: of this rank.
        """
        self._settings, self._job, self._rows = settings, job, rows
        self._model, self._device = model, device
        self._pass = OnePass(len(rows), settings.batch, settings.micro_batch)
        self._group = dist.new_group(backend="gloo")
        self.best: EvalRecord | None = None

    def close(self) -> None:
        """Nothing is evaluated any more; every rank calls it."""
        dist.destroy_process_group(self._group)

    def due(self, step: int) -> bool:
        """Whether to evaluate after a step (counted from 1); always after the last."""
        every = self._settings.eval_every
        return step == self._settings.steps or bool(every and step % every == 0)

    def evaluate(self, step: int, interruption: Interruption) -> tuple[EvalRecord | None, int]:
        """One pass over the rows.

        Args:
          step: that was done before.
          interruption: of this process.
        Returns: what was found, the same on every rank, and 0; or None and the number of a signal
          that any rank has had: then the pass is broken off.
        Raises: AgreedError on every rank if a row cannot be used, no row has a label, or the loss
          is not finite.
        """
        start, job = time.perf_counter(), self._job
        loss = right = 0.0
        tokens = labels = 0
        loader = Loader(self._pass, self._rows, job.images, job.config, job.bound, self._group)
        with torch.no_grad(), loader as batches:
            for batch in batches:
                (mean, share), signal = self._batch(batch, interruption.signal)
                if signal:
                    return None, signal
                loss, right = loss + mean * batch.labels, right + share * batch.labels
                tokens, labels = tokens + batch.tokens, labels + batch.labels
        if not labels:
            raise AgreedError(f"--eval {self._settings.eval} has no labelled token")
        mean = loss / labels
        if not math.isfinite(mean):
            raise AgreedError(f"loss on --eval {self._settings.eval} is {mean} after step {step}")
        record = EvalRecord(
            step=step,
            eval_loss=mean,
            eval_accuracy=right / labels,
            eval_rows=len(self._rows),
            eval_tokens=tokens,
            eval_labels=labels,
            eval_seconds=time.perf_counter() - start,
            best=self.best is None or mean < self.best.eval_loss,
        )
        self.best = record if record.best else self.best
        return record, 0

    def _batch(self, batch: Batch, signal: int) -> tuple[list[float], int]:
        """Mean loss and share of right tokens of a batch; a batch without labels has none."""
        scores = Scores(self._device)
        term = torch.zeros((), device=self._device)
        for part in batch.parts if batch.labels else ():
            part.at.send_ahead(self._device, DTYPES[self._settings.dtype])
            loss = partial(scores, at=part.at)
            term += self._model(to_device(part.inputs, self._device), part.at, loss=loss)
        return sum_over_ranks(torch.stack([term, scores.right]), signal)
