"""What a training run shows and writes down: live progress, a metrics file, a plot."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console

from model.training.display import WINDOW, Live, Plain, summary
from model.training.plot import draw
from model.training.record import StepRecord


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
