"""Starting and ending the ranks of a program: process group, errors told once, prompt exits."""

import datetime
import importlib
import os
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from model.training.heartbeat import Heartbeat
from model.training.interruption import Interruption
from model.training.report import silence, tell, tell_launcher, warn
from vlshard.comm import AgreedError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
START = datetime.timedelta(minutes=10)
TIMEOUT_SECONDS = 600.0
ENDED = "vlshard/ended"
# What gloo says where the other end of a message has gone, and where it waited too long for it.
LOST = ("onnection closed by", "onnection reset by", "roken pipe", "imed out waiting", "Read error")


class StoredEnd:
    """Lets ranks end each other through the store at which they met."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def end(self, status: int) -> None:
        """Tell the other ranks to end at once."""
        self._store.set(ENDED, str(status))

    def ended(self) -> int | None:
        """The status to end with, if a rank has told the others to."""
        return int(self._store.get(ENDED)) if self._store.check([ENDED]) else None


def join_ranks(
    device: str | None = None,
    interruption: Interruption | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> torch.device:
    """Join the process group that torchrun describes, or make one of this process alone.

    Args:
      device: ``cpu``, ``cuda`` or ``npu``; None is cuda where there is any, else cpu.
      interruption: of this process; it gets to know the other ranks.
      timeout: the longest that a rank waits for others in a step [s].
    Returns: the device of this rank.
    Raises: AgreedError if there is no such device here.
    """
    kind = device or _default_device()
    place, limit = _place(kind), datetime.timedelta(seconds=timeout)
    if "RANK" in os.environ:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=START)))
        if interruption is not None:
            interruption.others = StoredEnd(store.clone())
            interruption.watch = Heartbeat(store.clone(), rank, size)
    else:
        store, rank, size = dist.HashStore(), 0, 1
    dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=size, timeout=limit)
    return place


def run(
    main: Callable[[], int], interruption: Interruption | None = None, *, speak: bool = True
) -> None:
    """Run a program and exit; errors that all ranks share are told by rank 0, in one line.

    After an error the process ends at once: threads and collectives may wait for ranks that have
    gone. So it does after a run: the interpreter would take down gloo's threads while they work,
    which aborts the process now and then.

    Args:
      main: returns the exit status.
      interruption: of this process; a rank whose collective failed because another one was ended
        by a signal ends like it.
      speak: whether rank 0 tells the errors that all ranks share; else whoever started them does.
    """
    try:
        status = main()
    except AgreedError as error:
        status = tell(error, speak=speak)
    except SystemExit:
        raise
    except BaseException as error:
        status = (interruption.ended_by_others() if interruption else None) or 1
        if status == 1:
            tell_surprise(error, speak=speak)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # nobody listens; no error at the exit
            silence(stream)
    if not status:
        dist.destroy_process_group()
    os._exit(status)


def tell_surprise(error: BaseException, *, speak: bool = True) -> None:
    """Tell an error that this rank alone has: that another one has gone, or where it came up."""
    lost = lost_rank(error)
    text = lost or f"{type(error).__name__}: {error}"
    text = f"rank {os.environ.get('RANK', 0)}: {text}"
    tell_launcher(text, 1)
    if lost is None:
        traceback.print_exc()
    elif speak:
        warn(f"error: {text}")


def lost_rank(error: BaseException) -> str | None:
    """What to say of a message that failed because the rank at its other end has gone, or None."""
    if not isinstance(error, RuntimeError) or not any(mark in str(error) for mark in LOST):
        return None
    reason = str(error).strip().splitlines()[0]
    return f"another rank has gone, or hangs ({reason}); --resume goes on from a checkpoint"


def _default_device() -> str:
    """The accelerator if it is cuda; asks nothing of torch.cuda where torch has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cuda" if accelerator is not None and accelerator.type == "cuda" else "cpu"


def _place(kind: str) -> torch.device:
    """The device of this rank, of a kind that is there."""
    if kind == "cpu":
        return torch.device(kind)
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError) as error:
            raise AgreedError(f"--device npu: torch_npu cannot be imported: {error}") from error
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        there = "no accelerator" if found is None else f"{found.type} alone"
        raise AgreedError(f"--device {kind}: torch {torch.__version__} finds {there} here")
    number, count = int(os.environ.get("LOCAL_RANK", 0)), torch.accelerator.device_count()
    if number >= count:
        note = "fix: start no more ranks on a machine than it has devices"
        raise AgreedError(f"--device {kind}: no device {number}, there are {count}", notes=[note])
    place = torch.device(kind, number)
    torch.accelerator.set_device_index(place)
    return place
