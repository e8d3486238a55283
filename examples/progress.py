"""What a training run shows and writes down: live progress, a metrics file, a plot."""

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

WINDOW = 20
PLAIN_SECONDS = 2.0


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


class Journal:
    """Takes the records of a run on one rank; a context manager."""

    def __init__(
        self,
        steps: int,
        metrics: Path | None = None,
        plot: Path | None = None,
        console: Console | None = None,
    ) -> None:
        """Open the journal.

        Args:
          steps: number of steps to come.
          metrics: file to write one JSON object a step to, or None.
          plot: picture to draw of loss and gradient norm at the end, or None.
          console: where progress is shown; None is standard output.
        """
        self.records: list[StepRecord] = []
        self._steps, self._plot = steps, plot
        self._file: TextIO | None = metrics.open("w") if metrics else None
        console = console or Console(soft_wrap=True, highlight=False)
        self._display = Live(steps, console) if console.is_terminal else Plain(steps, console)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._display.close()
        if self._file:
            self._file.close()
        if self._plot and self.records:
            draw(self.records, self._plot)

    def add(self, record: StepRecord) -> None:
        """Show a step and write it down at once."""
        self.records.append(record)
        if self._file:
            self._file.write(json.dumps(asdict(record)) + "\n")
            self._file.flush()
        self._display.show(record, summary(self.records[-WINDOW:]))


class Live:
    """A bar that moves, for terminals."""

    def __init__(self, steps: int, console: Console) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task("waiting for the first batch", total=steps)
        self._progress.start()

    def show(self, record: StepRecord, text: str) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=record.step, description=text)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class Plain:
    """Lines, a few seconds apart, for logs; the first and the last step are always shown."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._console = steps, console
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._shown = float("-inf")

    def show(self, record: StepRecord, text: str) -> None:
        """Print the step if it is time to."""
        self._recent.append(record.seconds)
        now = time.monotonic()
        if record.step < self._steps and now - self._shown < PLAIN_SECONDS:
            return
        self._shown = now
        left = (self._steps - record.step) * sum(self._recent) / len(self._recent)
        self._console.print(f"step {record.step}/{self._steps}  {text}  {left:.0f} s left")

    def close(self) -> None:
        """Nothing is open."""


def summary(records: Sequence[StepRecord]) -> str:
    """The last record in words, with rates over all that are given."""
    last = records[-1]
    seconds = max(sum(record.seconds for record in records), 1e-9)
    tokens = sum(record.tokens for record in records) / seconds
    images = sum(record.images for record in records) / seconds
    rates = f"{tokens:.0f} tokens/s  {images:.1f} images/s"
    return f"loss {last.loss:.4f}  grad norm {last.grad_norm:.3f}  {rates}"


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be written at the end.

    Raises: OSError that says why.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.filetypes)
    if path.suffix[1:].lower() not in kinds:
        raise OSError(f"{path} is no picture that can be drawn: expected .{', .'.join(kinds)}")
    if path.is_dir():
        raise OSError(f"{path} is a folder, not a picture")


def draw(records: Sequence[StepRecord], path: Path) -> None:
    """Draw loss and gradient norm over steps into a picture file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    steps = [record.step for record in records]
    for axis, name in zip(axes, ("loss", "grad_norm"), strict=True):
        axis.plot(steps, [getattr(record, name) for record in records], linewidth=1)
        axis.set_ylabel(name.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
