"""Collectives in flight: sent when they are started, waited for where their result is used.

A trip in flight is two autograd nodes. *Start* launches in forward and waits in backward, *finish*
waits in forward and launches in backward; a 0-dim token links them, so nobody sees a buffer that
is not filled yet. Where all starts of a forward come before all finishes, autograd runs all
launches before the waits in backward as well.

Start and finish belong in one checkpointed region, and no rank may leave a trip out for having
nothing to send.
"""

from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from vlshard.comm.collectives import SumInParts, Swap, swap, travel
from vlshard.comm.compare_calls import watch_of
from vlshard.comm.graph_break import untraced
from vlshard.comm.mesh import Mesh
from vlshard.comm.pending import Pending
from vlshard.comm.reshard import bound_program, run_stages, told_call
from vlshard.comm.transport import Flight
from vlshard.language import Packing
from vlshard.programs import Moves


@untraced
def start(x: Shaped[Tensor, "..."], arrow: str, mesh: Mesh, /, **sizes: int | Packing) -> Pending:
    """Send a tensor from one layout towards another, as ``reshard`` does, without waiting.

    The last step that communicates is in flight when this returns; the steps before it have been
    carried out, those after it follow when the result is waited for. The tensor must not be
    changed in place until then. Its gradient cannot be differentiated again.

    Args:
      x: this rank's part in the layout on the left.
      arrow: both layouts, such as ``b s@cp h d -> b s h@cp d``.
      mesh: the axes, and the ranks along them.
      sizes: global size or packing of dims, by name.
    Returns: the tensor in flight; ``wait`` gives this rank's part in the layout on the right.
    Raises: as ``reshard``.
    """
    if watch := watch_of(mesh):
        watch.compare("start", lambda: told_call(x, arrow, mesh, sizes))
    program = bound_program(x, arrow, mesh, sizes)
    program.check(tuple(x.shape))
    stages = program.stages
    last = max((i for i, (_, group) in enumerate(stages) if group is not None), default=None)
    if last is None:
        return Pending.here(program(x))
    part, group = stages[last]
    x = run_stages(x, stages[:last])
    if part.moves is not None:
        pending = start_rows(x, part.dims, part.moves, group)
    elif group is not None:
        pending = start_sum(x, group)
    else:
        raise AssertionError(f"a step that communicates has no group: {part}")
    return pending.then(lambda y: run_stages(y, stages[last + 1 :]))


def start_rows(
    x: Tensor, dims: tuple[int, int], moves: Moves, group: ProcessGroup | None
) -> Pending:
    """``collectives.move_rows`` in flight."""
    trip = swap(x, dims, moves, group)
    if trip is None:
        return Pending.here(x)
    return Pending.here(travel(x, trip)) if trip.group is None else _depart(x, trip)


def start_sum(x: Tensor, group: ProcessGroup) -> Pending:
    """``collectives.all_reduce`` in flight: the sums are carried out, and fly to all ranks."""
    parts = SumInParts.of(x, group)
    return _depart(travel(parts.cut(x), parts.scatter), parts.gather).then(parts.join)


class _Leg:
    """A trip one way: at most one tensor is in the air at a time."""

    def __init__(self, trip: Swap) -> None:
        self._trip = trip
        self._air: tuple[Flight, Tensor] | None = None

    def launch(self, x: Tensor) -> None:
        """Send a tensor; it is kept, so that nobody takes its memory over before it has left."""
        self._air = self._trip.launch(x), x

    def land(self) -> Tensor:
        """Wait for what was sent."""
        if self._air is None:
            raise AssertionError("nothing was sent on this leg")
        (flight, _), self._air = self._air, None
        return self._trip.land(flight)


def _depart(x: Tensor, trip: Swap) -> Pending:
    """Send a tensor; waiting for it is the other autograd node."""
    there, back = _Leg(trip), _Leg(trip.reverse)
    token = _apply(_Start, x, there, back)
    return Pending(untraced(lambda: _apply(_Finish, token, there, back)))


class _Start(torch.autograd.Function):
    """Launches in forward, waits in backward; gives the token that leads to the finish."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Leg, back: _Leg) -> Tensor:
        ctx.back = back
        there.launch(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a tensor in flight")
        return ctx.back.land(), None, None


class _Finish(torch.autograd.Function):
    """Waits in forward, launches in backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, there: _Leg, back: _Leg) -> Tensor:
        ctx.back = back
        return there.land()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a tensor in flight")
        ctx.back.launch(grad_outputs[0])
        return grad_outputs[0].new_zeros(()), None, None


def refuse_second_derivative(what: str) -> None:
    """Called in a backward that communicates and so is not itself differentiable.

    Args:
      what: the operation, for the message.
    Raises: RuntimeError if a graph of this backward is asked for.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} is differentiable once only, so without create_graph=True")


def _apply(function: Any, *arguments: Any) -> Tensor:
    """``function.apply`` with its type."""
    return function.apply(*arguments)
