"""A switch for debugging: ranks compare each move before they make it.

A move is a collective. Where two ranks ask for different ones, torch waits for its time limit, or
one of them is aborted, or numbers land where they do not belong; here all of them say what was
asked for, and where.
"""

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from vlshard.comm.agreement import AgreedError
from vlshard.comm.fingerprints import refuse_differences
from vlshard.comm.groups import new_own_group
from vlshard.comm.mesh import Mesh
from vlshard.language import ShardError

Facts = Callable[[], Mapping[str, object]]

FIX = "fix: every rank makes the same calls, in the same order"


class Watch:
    """The calls of the ranks of a mesh, counted and compared.

    Attributes:
      ranks: their global ranks.
    """

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        self.ranks, self._seconds, self._calls = list(ranks), seconds, 0
        limit = timedelta(seconds=seconds)
        self._group: dist.ProcessGroup | None = new_own_group(
            self.ranks, backend="gloo", timeout=limit
        )

    def compare(self, name: str, facts: Facts) -> None:
        """Go on only if all ranks are at the same call.

        Args:
          name: of the call.
          facts: what must be the same, and raises what this rank's call would raise.
        Raises: AgreedError with one text on every rank; what ``facts`` raises, on that rank.
        """
        if self._group is None:
            return
        self._calls += 1
        call, told, error = f"{name} (call {self._calls})", {}, None
        try:
            told = facts()
        except (ShardError, TypeError) as caught:
            error = caught
        fault = None if error is None else f"rank {dist.get_rank()}: {error}"
        started = time.monotonic()
        try:
            refuse_differences(
                {"call": call, **told},
                self._group,
                beside={"from": _caller()},
                fault=fault,
                headline="ranks make different calls",
                fix=FIX,
            )
        except AgreedError as agreed:
            raise error or agreed from None
        except RuntimeError as lost:
            waited = f"{time.monotonic() - started:.0f} s"
            headline = f"other ranks did not come to {name} (from {_caller()}) within {waited}"
            raise ShardError(headline, notes=[FIX]) from lost

    def follow(self, x: Tensor, name: str) -> Tensor:
        """The tensor; when its gradient comes back, that call is compared too."""
        if not x.requires_grad:
            return x
        return cast(Any, _Followed).apply(x, self, f"backward of call {self._calls}")

    def close(self) -> None:
        """Compare nothing any more."""
        group, self._group = self._group, None
        dist.destroy_process_group(group)


class _Followed(torch.autograd.Function):
    """The identity; its backward is compared."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: Watch, name: str) -> Tensor:
        ctx.watch, ctx.name = watch, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.watch.compare(ctx.name, dict)
        return grad_outputs[0], None, None


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def watch_of(mesh: object) -> Watch | None:
    """What compares calls over the ranks of a mesh; None where nothing does."""
    watch = _watch.get()
    if watch is None or not isinstance(mesh, Mesh) or list(mesh.ranks) != watch.ranks:
        return None
    return watch


@contextmanager
def compare_calls(mesh: Mesh, *, seconds: float = 60.0) -> Generator[None]:
    """Compare ``reshard`` and ``start`` over the ranks of a mesh while a block runs; for debugging.

    Before each call, and before the backward of each ``reshard``, all ranks say what they are
    about to do: arrow, sizes, dtype, whether a gradient is wanted. If they differ, or one of them
    cannot make its call, all raise one error that shows what each rank asked for and where; so do
    those who wait for a rank that makes no call, and at the end of the block. Flights may be
    waited for in any order, so that is not compared. It costs some messages a call.

    Args:
      mesh: every rank of it enters the block; calls over the same ranks are compared.
      seconds: how long a rank waits for the others.
    Raises: AgreedError on every rank that names what differs; ShardError if others do not come.
    """
    _ = mesh.here
    watch = Watch(mesh.ranks, seconds)
    token = _watch.set(watch)
    try:
        yield
        watch.compare("the end of the block", dict)
    finally:
        _watch.reset(token)
        watch.close()


def _caller() -> str:
    """File and line from where this package was called."""
    # inspect.currentframe() is the same, but may be None by its type.
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    inside = ("vlshard.", "contextlib", "torch.")
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(inside):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
