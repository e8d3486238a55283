"""What is kept of a training step."""

from collections.abc import Sequence
from dataclasses import dataclass

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
