"""What a training run shows and writes down: live progress, a metrics file, a plot."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console

from model.training.board import Board
from model.training.display import WINDOW, Live, Plain, eval_line, summary
from model.training.metrics_file import RunHead, add_line, open_metrics
from model.training.plot import draw
from model.training.record import EvalRecord, StepRecord
from model.training.report import silence, warn


class Journal:
    """Takes the records of a run on one rank; a context manager.

    ``records`` and ``evaluations`` are what it has; at its end ``written`` says what is where.

    What it cannot show or write (a full disk, a closed pipe) is told once on standard error and
    left out from then on: no training ends for it.
    """

    def __init__(
        self,
        steps: int,
        metrics: Path | None = None,
        plot: Path | None = None,
        board: Path | None = None,
        console: Console | None = None,
        head: RunHead | None = None,
        after: int = 0,
    ) -> None:
        """Open the journal.

        Args:
          steps: number of steps to come.
          metrics: file to write one JSON object a step to, or None.
          board: folder for TensorBoard, or None.
          plot: picture to draw of loss and gradient norm at the end, or None.
          console: where progress is shown; None is standard output.
          head: first line of the metrics file.
          after: last step of the checkpoint that the run goes on from; what its metrics file has
            of steps up to it stays.
        """
        self.records: list[StepRecord] = []
        self.evaluations: list[EvalRecord] = []
        self.written: dict[str, Path] = {}
        self._plot, self._metrics = plot, metrics
        self._file: TextIO | None = None
        self._display: Live | Plain | None = None
        if metrics:
            with self._spared(str(metrics)):
                self._file, kept = open_metrics(metrics, head or RunHead(""), after)
                self.records, self.evaluations = kept.steps, kept.evaluations
        self._board_place = board
        self._board: Board | None = None
        if board:
            with self._spared(str(board)):
                self._board = Board(board, head.run if head else "run", after)
        self._console = console or Console(soft_wrap=True, highlight=False)
        with self._shown():
            kind = Live if self._console.is_terminal else Plain
            self._display = kind(steps, self._console)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_display()
        with self._spared(str(self._metrics)):
            if self._file and self._metrics:
                self._file.close()
                self.written["metrics"] = self._metrics
        with self._spared(str(self._board_place)):
            if self._board and self._board_place:
                self._board.close()
                self.written["board"] = self._board_place
        with self._spared(str(self._plot)):
            if self._plot and self.records:
                draw(self.records, self.evaluations, self._plot)
                self.written["picture"] = self._plot

    def add(self, record: StepRecord) -> None:
        """Show a step and write it down at once."""
        self.records.append(record)
        self._keep(record)
        with self._shown():
            if self._display:
                self._display.show(record, summary(self.records[-WINDOW:]))

    def add_evaluation(self, record: EvalRecord) -> None:
        """Show an evaluation and write it down at once."""
        self.evaluations.append(record)
        self._keep(record)
        with self._shown():
            if self._display:
                self._display.note(eval_line(record))

    def _keep(self, record: StepRecord | EvalRecord) -> None:
        """Write a line of the metrics; after one that could not be written there are no more."""
        file, self._file = self._file, None
        with self._spared(str(self._metrics)):
            if file:
                add_line(file, asdict(record))
                self._file = file
        board, self._board = self._board, None
        with self._spared(str(self._board_place)):
            if board:
                board.add(record)
                self._board = board

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
