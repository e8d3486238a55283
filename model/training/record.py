"""What is kept of a training step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MANY_RANKS = 64


@dataclass(frozen=True)
class Spread:
    """How evenly something is spread over ranks, where they are too many to list."""

    min: int
    mean: float
    max: int


Rows = tuple[int, ...] | Spread


def kept_rows(rows: Sequence[int]) -> Rows:
    """Rows of each rank as metrics keep them: above ``MANY_RANKS`` ranks, their spread."""
    if len(rows) <= MANY_RANKS:
        return tuple(rows)
    return Spread(min(rows), sum(rows) / len(rows), max(rows))


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation; the fields of a line of the metrics file.

    Attributes:
      step: training steps done before it.
      eval_loss: mean over all labelled tokens.
      eval_accuracy: share of the labelled tokens to which the model gives the largest logit.
      eval_rows: rows that were evaluated.
      eval_tokens: of all ranks, without padding.
      eval_labels: labelled tokens of all ranks.
      eval_seconds: wall time.
      best: whether its loss is the lowest so far.
    """

    step: int
    eval_loss: float
    eval_accuracy: float
    eval_rows: int
    eval_tokens: int
    eval_labels: int
    eval_seconds: float
    best: bool


@dataclass(frozen=True)
class StepRecord:
    """One training step; the fields of a line of the metrics file.

    Attributes:
      step: number of the step, from 1.
      loss: over the whole global batch; 0 if it has no label.
      grad_norm: before clipping.
      lr: learning rate of the step.
      tokens: of all ranks, without padding.
      labels: tokens of all ranks that are learned; without any, no weight moves.
      images: of all ranks.
      seconds: wall time of the step, waiting for data included.
      vision_rows: patches that each rank pushed through the vision tower; their spread where
        ranks are many.
      text_rows: token positions that each rank pushed through the decoder, likewise.
      unlabelled: steps so far, this one included, that had no label.
      epoch: passes over the data so far, this step included.
      tokens_per_second: of all ranks, without padding.
      model_flops: operations that the model asks for, forward and backward (``flops.py``).
      flops_per_second: of all ranks.
      peak_share: of what all devices could do, where ``--peak-flops`` says that; else None.
      peak_mib: most memory of each rank so far: of the device's allocator; on CPUs of the process
        [MiB]. Their spread where ranks are many.
      data_seconds: rank 0's wait for the batch.
      forward_seconds: on rank 0, with its messages, as those that follow.
      backward_seconds: with the reductions of gradients.
      exchange_seconds: the sum of the loss over ranks, and so the wait for the slowest.
      update_seconds: norm, clipping and AdamW.
      lrs: rates of the patterns of ``--lr-of``.
      aux_loss: load balance of the experts, the mean over micro-batches; None without
        ``--aux-loss``. The loss holds it, times its coefficient.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    labels: int
    images: int
    seconds: float
    vision_rows: Rows
    text_rows: Rows
    unlabelled: int = 0
    epoch: float = 0.0
    tokens_per_second: float = 0.0
    model_flops: int = 0
    flops_per_second: float = 0.0
    peak_share: float | None = None
    peak_mib: Rows = ()
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    exchange_seconds: float = 0.0
    update_seconds: float = 0.0
    lrs: Mapping[str, float] = field(default_factory=dict)
    aux_loss: float | None = None
