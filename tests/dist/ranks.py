"""A pool of gloo ranks that is started once and runs many cases.

``Ranks(4).run(function, *args)`` calls a module-level function on every rank and returns what the
ranks returned, in rank order. A rank finds the function by its file and name, so a test module
can hand over its own functions. Arguments and results are pickled; each rank has one thread,
the shape hook on and warnings as errors, as pytest's own process has.

The ranks are forked from one process that has imported torch and the packages, so that this is
done once a pool. A failing rank raises its traceback here. A rank that is still busy at the time
limit is killed, after its stack was written down. After either, the next run starts fresh ranks.
"""

import contextlib
import datetime
import faulthandler
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120
GRACE_SECONDS = 3
PRELOADED = ("torch.distributed.fsdp", "vlshard", "model.modules", "model.data")


class RankError(AssertionError):
    """A rank failed, died or ran out of time."""


class Ranks:
    """Processes with one default group of gloo ranks."""

    def __init__(self, world: int) -> None:
        """Prepare; the processes start with the first run.

        Args:
          world: number of ranks.
        """
        self.world = world
        self._origin: subprocess.Popen[bytes] | None = None
        self._pids: list[int] = []
        self._pipes: list[Connection] = []
        self._logs: list[Path] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Call a function on every rank.

        Args:
          function: a module-level function; ``torch.distributed`` is up when it is called.
          args: its arguments, the same on every rank.
          timeout: seconds until the ranks are killed (starting them does not count).
        Returns: the ranks' results, in rank order.
        Raises: RankError with the ranks' tracebacks, exits or stacks.
        """
        if self._origin is None:
            self._start()
        path = inspect.getsourcefile(function)
        message = pickle.dumps((path, function.__qualname__, args))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            pass  # that rank is gone; collecting says so
        return self._collect(timeout, f"{function.__name__} on {self.world} ranks")

    def close(self) -> None:
        """Stop the ranks."""
        for pipe in self._pipes:
            pipe.close()
        if self._origin is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._origin.pid, signal.SIGKILL)
            self._origin.wait()
        for log in self._logs:
            log.unlink()
        self._origin, self._pids, self._pipes, self._logs = None, [], [], []

    def _start(self) -> None:
        """Start the processes; rank 0 chooses the port at which all of them meet."""
        environment = {
            **{k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK")},
            **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
        }
        theirs: list[Connection] = []
        handles: list[int] = []
        for rank in range(self.world):
            mine, other = Pipe()
            handle, log = tempfile.mkstemp(suffix=f".rank{rank}.log")
            self._pipes.append(mine)
            self._logs.append(Path(log))
            theirs.append(other)
            handles.append(handle)
        numbers = [str(n) for n in (*(pipe.fileno() for pipe in theirs), *handles)]
        self._origin = subprocess.Popen(
            [sys.executable, __file__, *numbers],
            cwd=ROOT,
            env=environment,
            pass_fds=[int(n) for n in numbers],
            stdin=subprocess.DEVNULL,
            stdout=handles[0],
            stderr=handles[0],
            start_new_session=True,
        )
        for handle, pipe in zip(handles, theirs, strict=True):
            os.close(handle)
            pipe.close()
        port = self._collect(START_SECONDS, "start", ranks=[0])[0]
        for pipe in self._pipes[1:]:
            pipe.send_bytes(pickle.dumps(port))
        self._pids = self._collect(START_SECONDS, "start")

    def _collect(self, timeout: float, what: str, ranks: list[int] | None = None) -> list[Any]:
        """One answer of each rank; the first failure leaves the others a short time."""
        results: dict[int, Any] = {}
        faults: dict[int, str] = {}
        missing = set(range(self.world) if ranks is None else ranks)
        deadline = time.monotonic() + timeout
        while missing and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([self._pipes[rank] for rank in sorted(missing)], left):
                rank = self._pipes.index(pipe)
                missing.remove(rank)
                try:
                    good, value = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    good, value = False, f"died\n{self._tail(rank)}"
                (results if good else faults)[rank] = value
                if not good:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not missing and not faults:
            return [results[rank] for rank in sorted(results)]
        for rank in missing if self._pids else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.5 if missing else 0)
        busy = {
            rank: f"no answer in {timeout:g} s; it was at\n{self._tail(rank)}" for rank in missing
        }
        self.close()
        texts = (f"rank {rank}: {text}" for rank, text in sorted({**faults, **busy}.items()))
        raise RankError(f"{what} failed\n" + "\n".join(texts))

    def _tail(self, rank: int) -> str:
        """The end of what a rank printed."""
        return self._logs[rank].read_text(errors="replace")[-4000:]


def _load(path: str, modules: dict[str, types.ModuleType]) -> types.ModuleType:
    """The module in a file, imported once a rank."""
    if path not in modules:
        name = f"case_{len(modules)}_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules[path] = module
    return modules[path]


def _join(rank: int, world: int, pipe: Connection) -> None:
    """Bring up the default group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=START_SECONDS)
    port = 0 if rank == 0 else pickle.loads(pipe.recv_bytes())
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, limit, wait_for_workers=False)
    if rank == 0:
        pipe.send_bytes(pickle.dumps((True, store.port)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _serve(rank: int, world: int, pipe: Connection) -> None:
    """Run what comes down the pipe until it closes."""
    _join(rank, world, pipe)
    warnings.simplefilter("error")
    pipe.send_bytes(pickle.dumps((True, os.getpid())))
    modules: dict[str, types.ModuleType] = {}
    while True:
        try:
            path, name, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, getattr(_load(path, modules), name)(*args))
            message = pickle.dumps(answer)
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(message)


def _fork(pipes: list[int], logs: list[int]) -> None:
    """Import what all ranks need, become all of them, and wait for them to end."""
    importlib.import_module("tests.shape_hook").install()
    for name in PRELOADED:
        importlib.import_module(name)
    for rank, (pipe, log) in enumerate(zip(pipes, logs, strict=True)):
        if os.fork() == 0:
            for other in {*pipes, *logs} - {pipe, log}:
                os.close(other)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.register(signal.SIGUSR1, all_threads=False)
            _serve(rank, len(pipes), Connection(pipe))
            os._exit(0)
    for pipe in pipes:
        os.close(pipe)
    for _ in pipes:
        os.wait()


if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[1:]]
    _fork(numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :])
