"""Starts the ranks of a program on this machine; what went wrong is told once, at the very end.

It is torch.distributed's launcher that starts, watches and ends them; what it logs and the table
that it ends with are kept off the screen.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from model.training.interruption import status_of
from model.training.report import warn

ROOT = Path(__file__).resolve().parents[2]
SIGNALLED = {status_of(number) for number in (signal.SIGINT, signal.SIGTERM)}


@dataclass(frozen=True)
class Ended:
    """How a rank has ended.

    Attributes:
      rank: which one.
      status: its exit status; below zero it is the signal that killed it, negated.
      told: what it left in its error file; empty if it left none.
    """

    rank: int
    status: int
    told: Mapping[str, object]


def start_ranks(module: str, arguments: Sequence[str], ranks: int, shutdown_timeout: float) -> int:
    """Run a module as so many processes of one group, and tell why it failed if it did.

    Args:
      module: run by each rank as ``python -m``; an error leaves its text in the rank's error file.
      arguments: of each rank.
      ranks: how many there are.
      shutdown_timeout: seconds that ranks have to end after a signal to this process.
    Returns: the exit status.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    logging.disable(logging.ERROR)  # of the launcher, which is all that this process does
    with tempfile.TemporaryDirectory(prefix="vlshard-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            shutdown_timeout=round(shutdown_timeout),
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            failures = error.failures.items()
            ended = [Ended(rank, f.exitcode, _read(Path(f.error_file))) for rank, f in failures]
        except SignalException as error:
            files = sorted(Path(folder).rglob("error.json"))
            status = status_of(error.sigval)
            ended = [Ended(int(f.parent.name), status, _read(f)) for f in files]
            ended = [rank for rank in ended if rank.told.get("status") == 1]
            if not ended:
                return status
        else:
            return 0
    text, status = cause(ended)
    if text:
        warn(f"error: {text}")
    return status


def cause(ended: Sequence[Ended]) -> tuple[str, int]:
    """Why ranks have failed, and the exit status that says so.

    A rank that was killed has taken the others with it; else the first error has.

    Args:
      ended: those that did not end with status 0.
    Returns: no text where the ranks were stopped by a signal: they have told it.
    """
    killed = [rank for rank in ended if rank.status < 0 and -rank.status != signal.SIGTERM]
    stopped = [rank for rank in ended if rank.status in SIGNALLED]
    told = sorted((rank for rank in ended if rank.told), key=_time)
    if stopped and not killed:
        return "", stopped[0].status
    if killed:
        first = killed[0]
        return f"rank {first.rank} was killed by {signal.Signals(-first.status).name}", 1
    if told:
        return str(told[0].told.get("message")), 1
    return f"rank {ended[0].rank} ended with status {ended[0].status}; see above", 1


def _time(rank: Ended) -> float:
    found = rank.told.get("time", 0.0)
    return found if isinstance(found, float) else 0.0


def _read(path: Path) -> Mapping[str, object]:
    """What a rank has left; nothing if it left nothing that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return cast("Mapping[str, object]", found) if isinstance(found, dict) else {}
