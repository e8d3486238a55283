"""Starting and ending the ranks of a program: process group, errors told once, prompt exits."""

import datetime
import importlib
import os
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from model.training.report import tell
from vlshard.comm import AgreedError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
TIMEOUT = datetime.timedelta(minutes=10)


def join_ranks(device: str | None = None) -> torch.device:
    """Join the process group that torchrun describes, or make one of this process alone.

    Args:
      device: ``cpu``, ``cuda`` or ``npu``; None is cuda where there is any, else cpu.
    Returns: the device of this rank.
    """
    kind = device or _default_device()
    if kind == "npu":
        importlib.import_module("torch_npu")
    place = torch.device(kind)
    if kind != "cpu":
        place = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(place)
    if "RANK" in os.environ:
        dist.init_process_group(BACKENDS[kind], timeout=TIMEOUT)
    else:
        store = dist.HashStore()
        dist.init_process_group(BACKENDS[kind], store=store, rank=0, world_size=1, timeout=TIMEOUT)
    return place


def run(main: Callable[[], int]) -> None:
    """Run a program and exit; errors that all ranks share are told by rank 0, in one line.

    After an error the process ends at once: threads and collectives may wait for ranks that have
    gone.

    Args:
      main: returns the exit status.
    """
    try:
        status = main()
    except AgreedError as error:
        status = tell(error)
    except SystemExit:
        raise
    except BaseException:
        status = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
    dist.destroy_process_group()


def _default_device() -> str:
    """The accelerator if it is cuda; asks nothing of torch.cuda where torch has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cuda" if accelerator is not None and accelerator.type == "cuda" else "cpu"
