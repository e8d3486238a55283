"""What is kept of a training step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """One training step; the fields of a line of the metrics file.

    Attributes:
      step: number of the step, from 1.
      loss: over the whole global batch.
      grad_norm: before clipping.
      lr: learning rate of the step.
      tokens: of all ranks, without padding.
      images: of all ranks.
      seconds: wall time of the step, waiting for data included.
      vision_rows: patches that each rank pushed through the vision tower.
      text_rows: token positions that each rank pushed through the decoder.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    images: int
    seconds: float
    vision_rows: tuple[int, ...]
    text_rows: tuple[int, ...]
