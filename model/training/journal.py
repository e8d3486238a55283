"""What a training run shows and writes down: live progress, a metrics file, a plot."""

import json
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console

from model.training.display import WINDOW, Live, Plain, summary
from model.training.plot import draw
from model.training.record import StepRecord
from model.training.report import silence, warn


class Journal:
    """Takes the records of a run on one rank; a context manager.

    What it cannot show or write (a full disk, a closed pipe) is told once on standard error and
    left out from then on: no training ends for it.
    """

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
        self._plot, self._metrics = plot, metrics
        self._file: TextIO | None = None
        self._display: Live | Plain | None = None
        if metrics:
            with self._spared(str(metrics)):
                self._file = metrics.open("w")
        self._console = console or Console(soft_wrap=True, highlight=False)
        with self._shown():
            kind = Live if self._console.is_terminal else Plain
            self._display = kind(steps, self._console)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_display()
        with self._spared(str(self._metrics)):
            if self._file:
                self._file.close()
        with self._spared(str(self._plot)):
            if self._plot and self.records:
                draw(self.records, self._plot)

    def add(self, record: StepRecord) -> None:
        """Show a step and write it down at once."""
        self.records.append(record)
        file, self._file = self._file, None
        with self._spared(str(self._metrics)):
            if file:
                _write(file, record)
                self._file = file
        with self._shown():
            if self._display:
                self._display.show(record, summary(self.records[-WINDOW:]))

    def close_display(self) -> None:
        """Leave progress as it is; what is printed from now on stands below it."""
        with self._shown():
            if self._display:
                self._display.close()
        self._display = None

    @contextmanager
    def _shown(self) -> Generator[None]:
        """Show something; without anybody to see it, nothing more is shown."""
        try:
            yield
        except (OSError, ValueError, SystemExit) as error:  # rich exits where a pipe is closed
            self._display = None
            silence(self._console.file)
            warn(f"warning: progress cannot be shown: {error}; the run goes on")

    @contextmanager
    def _spared(self, what: str) -> Generator[None]:
        """Write something beside the weights, which must not be lost for it."""
        try:
            yield
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else None
            warn(f"warning: {what} cannot be written: {reason or error}; the run goes on")


def _write(file: TextIO, record: StepRecord) -> None:
    """Add a line; a file that takes none is closed."""
    try:
        file.write(json.dumps(asdict(record)) + "\n")
        file.flush()
    except OSError:
        with suppress(OSError):
            file.close()
        raise
