"""A pool of gloo ranks that is started once and runs many cases.

``Ranks(4).run(function, *args)`` calls a module-level function on every rank and returns what the
ranks returned, in rank order. Arguments and results are pickled; each rank has one thread and
warnings as errors, as pytest's own process has, and the shape hook where this process has it.

Ranks are forked from an ``Origin``: a copy of this process that waits for that. One made when all
tests are collected has imported everything and run nothing. A failing rank raises its traceback
here. A rank that is still busy at the time limit is killed, after its stack was written down.
After either, the next run starts fresh ranks.
"""

import contextlib
import datetime
import faulthandler
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

START_SECONDS = 120
GRACE_SECONDS = 3
REQUEST_BYTES = 4096
MOST_HANDLES = 64
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class RankError(AssertionError):
    """A rank failed, died or ran out of time."""


class Origin:
    """A copy of this process, as it is when this is made, that becomes ranks on request."""

    def __init__(self) -> None:
        """Fork it; of this process's open files it keeps none."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        gc.collect()
        gc.freeze()  # what is not looked at again stays shared memory
        self._pid = os.fork()
        if self._pid == 0:
            _originate(theirs)
        theirs.close()

    def fork(self, pipes: Sequence[int], logs: Sequence[int]) -> list[int]:
        """Start one rank for each pipe, which prints into the log beside it; their pids."""
        socket.send_fds(self._requests, [pickle.dumps(None)], [*pipes, *logs])
        return pickle.loads(self._requests.recv(REQUEST_BYTES))

    def end(self, pids: list[int]) -> None:
        """Kill ranks, whatever they are at."""
        self._requests.send(pickle.dumps(pids))
        self._requests.recv(REQUEST_BYTES)

    def close(self) -> None:
        """Let it go, with all its ranks."""
        self._requests.close()
        os.waitpid(self._pid, 0)


class Ranks:
    """Processes with one default group of gloo ranks."""

    def __init__(self, world: int, origin: Origin | None = None) -> None:
        """Prepare; the processes start with the first run.

        Args:
          world: number of ranks.
          origin: what the ranks are forked from; by default this process as it is now.
        """
        self.world = world
        self._origin = origin or Origin()
        self._owned = origin is None
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
        if not self._pids:
            self._start()
        message = pickle.dumps((function, args))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            pass  # that rank is gone; collecting says so
        return self._collect(timeout, f"{function.__name__} on {self.world} ranks")

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Call a function that some ranks may die of; all are gone afterwards.

        Args:
          function: as for ``run``; it raises nothing.
          args: its arguments.
          timeout: seconds until the ranks are killed (starting them does not count).
        Returns: what each rank returned; None of one that died or was busy at the limit.
        """
        if not self._pids:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        found: dict[int, Any] = {}
        missing, deadline = set(range(self.world)), time.monotonic() + timeout
        while missing and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([self._pipes[rank] for rank in sorted(missing)], left):
                rank = self._pipes.index(pipe)
                missing.remove(rank)
                with contextlib.suppress(EOFError, OSError):
                    found[rank] = pickle.loads(pipe.recv_bytes())[1]
        self._end()
        return [found.get(rank) for rank in range(self.world)]

    def close(self) -> None:
        """Stop the ranks."""
        self._end()
        if self._owned:
            self._origin.close()

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        if self._pids:
            self._origin.end(self._pids)
        for log in self._logs:
            log.unlink()
        self._pids, self._pipes, self._logs = [], [], []

    def _start(self) -> None:
        """Start the processes; rank 0 chooses the port at which all of them meet."""
        theirs: list[Connection] = []
        handles: list[int] = []
        for rank in range(self.world):
            mine, other = Pipe()
            handle, log = tempfile.mkstemp(suffix=f".rank{rank}.log")
            self._pipes.append(mine)
            self._logs.append(Path(log))
            theirs.append(other)
            handles.append(handle)
        self._pids = self._origin.fork([pipe.fileno() for pipe in theirs], handles)
        for handle, pipe in zip(handles, theirs, strict=True):
            os.close(handle)
            pipe.close()
        port = self._collect(START_SECONDS, "start", ranks=[0])[0]
        for pipe in self._pipes[1:]:
            pipe.send_bytes(pickle.dumps(port))
        self._collect(START_SECONDS, "start")

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
        for rank in missing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.5 if missing else 0)
        busy = {
            rank: f"no answer in {timeout:g} s; it was at\n{self._tail(rank)}" for rank in missing
        }
        self._end()
        texts = (f"rank {rank}: {text}" for rank, text in sorted({**faults, **busy}.items()))
        raise RankError(f"{what} failed\n" + "\n".join(texts))

    def _tail(self, rank: int) -> str:
        """The end of what a rank printed."""
        return self._logs[rank].read_text(errors="replace")[-4000:]


def _originate(requests: socket.socket) -> NoReturn:
    """Become ranks, or end them, as requests say, until nobody can make one any more."""
    alive: set[int] = set()
    try:
        _leave_behind(keep=requests.fileno())
        while True:
            message, handles, *_ = socket.recv_fds(requests, REQUEST_BYTES, MOST_HANDLES)
            if not message:
                break
            ending = pickle.loads(message)
            if ending is None:
                pids = _fork(requests, handles[: len(handles) // 2], handles[len(handles) // 2 :])
                alive.update(pids)
                requests.send(pickle.dumps(pids))
            else:
                _kill(ending)
                alive.difference_update(ending)
                requests.send(pickle.dumps(None))
    finally:
        _kill(alive)
        os._exit(0)


def _leave_behind(keep: int) -> None:
    """Put away what is of the process that was copied: open files, terminal, pytest's hands."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in map(int, os.listdir("/proc/self/fd")):
        if handle not in (keep, nothing):
            # Each number stays taken, so that whoever has it in an object closes nothing else's.
            os.dup2(nothing, handle)
    logging.getLogger().handlers.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _kill(pids: set[int] | list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def _fork(requests: socket.socket, pipes: list[int], logs: list[int]) -> list[int]:
    """One process for each pipe."""
    pids: list[int] = []
    for rank, (pipe, log) in enumerate(zip(pipes, logs, strict=True)):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                requests.close()
                for other in {*pipes, *logs} - {pipe, log}:
                    os.close(other)
                _become(rank, len(pipes), pipe, log)
            finally:
                os._exit(0)
    for handle in (*pipes, *logs):
        os.close(handle)
    return pids


def _become(rank: int, world: int, pipe: int, log: int) -> None:
    """Be a rank: print into the log, join the others, run what comes down the pipe."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    try:
        _serve(rank, world, Connection(pipe))
    except BaseException:
        traceback.print_exc()


def _join(rank: int, world: int, pipe: Connection) -> None:
    """Bring up the default group."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=START_SECONDS)
    port = 0 if rank == 0 else pickle.loads(pipe.recv_bytes())
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, limit, wait_for_workers=False)
    if rank == 0:
        pipe.send_bytes(pickle.dumps((True, store.port)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _serve(rank: int, world: int, pipe: Connection) -> None:
    """Run what comes down the pipe until it closes."""
    warnings.resetwarnings()
    _join(rank, world, pipe)
    warnings.simplefilter("error")
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(message)
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
