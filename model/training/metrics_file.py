"""The metrics file: whose it is, which steps it has, and going on with it."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from model.training.record import EvalRecord, StepRecord


@dataclass(frozen=True)
class RunHead:
    """The first line of a metrics file.

    Attributes:
      run: id of the run; it stays the same where a run goes on from a checkpoint.
      plan: as it was given.
      ranks: number of ranks.
      parameters: of the model.
      steps: how many are to be done.
      started: UTC, ISO 8601.
    """

    run: str
    plan: str = ""
    ranks: int = 1
    parameters: int = 0
    steps: int = 0
    started: str = ""


@dataclass
class Kept:
    """What a metrics file has of a run up to a step."""

    steps: list[StepRecord]
    evaluations: list[EvalRecord]
    size: int


class ForeignMetricsError(OSError):
    """A metrics file that another run has written."""


def check_metrics(path: Path, run: str) -> None:
    """Refuse to go on with a file that is another run's.

    Args:
      path: the file; one that is missing or empty is fine.
      run: id of the run that goes on.
    Raises: ForeignMetricsError that says whose it is.
    """
    found = run_of(path)
    if found not in (None, run):
        whose = f"of run {found}" if found else "no metrics of a run"
        text = f"--metrics {path} is {whose}, this one goes on with run {run}"
        raise ForeignMetricsError(f"{text}: name another file, or add --overwrite")


def run_of(path: Path) -> str | None:
    """The id of the run that has written a file; empty if none has, None if there is no file."""
    if not path.is_file() or not path.stat().st_size:
        return None
    with path.open("rb") as file:
        return str(_object(file.readline()).get("run", ""))


def open_metrics(path: Path, head: RunHead, after: int = 0) -> tuple[TextIO, Kept]:
    """Open a file to write lines to.

    Args:
      path: the file.
      head: its first line.
      after: last step of the checkpoint that the run goes on from. If the file is this run's, its
        lines up to this step stay and all others are cut off, so that none comes twice.
    Returns: the file, and what stays in it.
    """
    kept = Kept([], [], 0)
    if after and run_of(path) == head.run:
        kept = read_metrics(path, after)
        with path.open("r+b") as file:
            file.truncate(kept.size)
        return path.open("a", encoding="utf-8"), kept
    file = path.open("w", encoding="utf-8")
    add_line(file, asdict(head))
    return file, kept


def read_metrics(path: Path, last: int) -> Kept:
    """The records of a file up to a step; a line that was cut off, and all behind it, are not."""
    kept = Kept([], [], 0)
    with path.open("rb") as file:
        for i, line in enumerate(file):
            found = _object(line)
            if not line.endswith(b"\n") or not found or (i and found.get("step", last + 1) > last):
                break
            kept.size += len(line)
            if "loss" in found:
                kept.steps.append(StepRecord(**_known(StepRecord, found)))
            elif "eval_loss" in found:
                kept.evaluations.append(EvalRecord(**_known(EvalRecord, found)))
    return kept


def add_line(file: TextIO, line: dict[str, Any]) -> None:
    """Write a line at once; a file that takes none is closed."""
    try:
        file.write(json.dumps(line) + "\n")
        file.flush()
    except OSError:
        with suppress(OSError):
            file.close()
        raise


def _known(kind: type, found: dict[str, Any]) -> dict[str, Any]:
    """The fields that a record has."""
    return {name: value for name, value in found.items() if name in kind.__dataclass_fields__}


def _object(line: bytes) -> dict[str, Any]:
    """A line as an object; empty if it is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
