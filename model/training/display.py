"""Progress as it is shown: a bar on a terminal, lines in a log."""

import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model.training.record import EvalRecord, StepRecord

WINDOW = 20
PLAIN_SECONDS = 2.0


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

    def note(self, text: str) -> None:
        """Leave a line above the bar."""
        self._progress.console.print(text, soft_wrap=True, highlight=False)

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
        line = f"step {record.step}/{self._steps}  {text}  {left:.0f} s left"
        self.note(line)

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._console.file, flush=True)

    def close(self) -> None:
        """Nothing is open."""


def eval_line(record: EvalRecord) -> str:
    """An evaluation in words."""
    best = "  best so far" if record.best else ""
    loss, right = f"loss {record.eval_loss:.4f}", f"accuracy {record.eval_accuracy:.2%}"
    of = f"of {record.eval_labels:,} tokens in {record.eval_seconds:.1f} s"
    return f"step {record.step} evaluated: {loss}  {right} {of}{best}"


def summary(records: Sequence[StepRecord]) -> str:
    """The last record in words, with rates over all that are given."""
    last = records[-1]
    seconds = max(sum(record.seconds for record in records), 1e-9)
    tokens = sum(record.tokens for record in records) / seconds
    images = sum(record.images for record in records) / seconds
    rates = f"{tokens:.0f} tokens/s  {images:.1f} images/s"
    if last.peak_share is not None:
        share = sum(record.peak_share or 0.0 for record in records) / len(records)
        rates += f"  {share:.1%} of peak"
    return f"loss {last.loss:.4f}  grad norm {last.grad_norm:.3f}  {rates}"
