"""Traces of some steps, one file a rank, for Perfetto or chrome://tracing."""

from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch.profiler import profile, supported_activities

from model.training.report import warn


def trace_path(folder: Path, rank: int) -> Path:
    """Where a rank's trace is written."""
    return folder / f"rank-{rank:05}.json"


class Profiler:
    """A context manager that records some steps; a run that ends before them leaves no file."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        """Say what is recorded; without steps it is nothing.

        Args:
          steps: the first and the last, counted from 1.
          folder: for the traces.
        """
        self._steps, self._folder = steps or (0, 0), folder
        self._running: profile | None = None
        self.written: Path | None = None

    def before(self, step: int) -> None:
        """Start recording if this is the first step to be."""
        if step == self._steps[0]:
            self._running = profile(activities=supported_activities())
            self._running.start()

    def after(self, step: int) -> None:
        """Write what was recorded if this was the last step to be."""
        if step == self._steps[1]:
            self._write()

    def _write(self) -> None:
        """A trace that cannot be written is told; no run ends for it."""
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        path = trace_path(self._folder, dist.get_rank())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
            self.written = path
        except (OSError, RuntimeError) as error:
            warn(f"warning: {path} cannot be written: {error}; the run goes on")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
