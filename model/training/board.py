"""The numbers of a run for TensorBoard; needs tensorboardX, an extra."""

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

from model.training.record import EvalRecord, StepRecord

SKIPPED = {"step", "unlabelled", "best", "eval_rows", "eval_labels", "eval_tokens"}


def check_board() -> None:
    """Refuse a run whose board could not be written.

    Raises: OSError that says what to install.
    """
    if importlib.util.find_spec("tensorboardX") is None:
        text = "--tensorboard needs tensorboardX, which is not installed"
        raise OSError(f"{text}: pip install tensorboardX (the extra 'tensorboard')")


class Board:
    """Writes each number of a record as a scalar: those of steps, and those of evaluations."""

    def __init__(self, folder: Path, run: str, after: int = 0) -> None:
        """Open a folder's event file.

        Args:
          folder: of all runs; this one has a folder of its own in it.
          run: its id.
          after: last step of the checkpoint that the run goes on from; what the board has of later
            ones is hidden.
        """
        from tensorboardX import SummaryWriter

        purge = after + 1 if after else None
        self._writer: Any = SummaryWriter(str(folder / run), purge_step=purge)

    def add(self, record: StepRecord | EvalRecord) -> None:
        """Write the numbers of a record down at once."""
        for name, value in asdict(record).items():
            group = "evaluation" if isinstance(record, EvalRecord) else "training"
            if isinstance(value, int | float) and name not in SKIPPED:
                self._writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, record.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
