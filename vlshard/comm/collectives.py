"""Carries out moves of rows between ranks, differentiably.

The backward of a move is the reverse move; where a row went to several places, the gradients that
come back are summed. So gather and reduce-scatter, slice and zero-pad are each other's backward,
and an all-to-all or an exchange is its own, reversed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from vlshard.comm import transport
from vlshard.comm.ahead import Index
from vlshard.comm.transport import Flight, Landing
from vlshard.language import LayoutError
from vlshard.programs import Even, Moves, Positions

Shape = tuple[int, ...]
LARGE_SUM = 1 << 21  # bytes; gloo's own all-reduce takes longer than messages from here on
HALVES = (torch.bfloat16, torch.float16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tensors of a dtype are summed in: fp32 for all narrower floats."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass(frozen=True, eq=False)
class Swap:
    """Rows taken along one dim, sent through a group, and put together along another dim.

    Attributes:
      leave: what each member is sent, and the dim that it is taken along.
      arrive: where what each member sends goes, and the dim along which it is put.
      group: the members; None where nothing leaves this rank.
      me: this rank's place among them.
      lane: what tells it from other moves of the group.
      even: what the swaps of all members make up together, if blocks of one size.
    """

    leave: tuple[Positions, int]
    arrive: tuple[Positions, int]
    group: ProcessGroup | None
    me: int
    lane: int = transport.NO_LANE
    even: Even | None = None

    @property
    def reverse(self) -> "Swap":
        """The swap that brings every row back."""
        back, even = transport.lane_back(self.lane), self.even and self.even.reverse
        return Swap(self.arrive, self.leave, self.group, self.me, back, even)

    def launch(self, x: Tensor) -> Flight:
        """Send rows on their way, straight to their places in the result where that is possible."""
        (taken, taken_dim), (put, put_dim) = self.leave, self.arrive
        outgoing = _take(taken, x, taken_dim)
        shape = list(x.shape)
        shape[taken_dim] = taken.sizes.get(self.me, 0)
        before, after = shape[:put_dim], shape[put_dim + 1 :]
        shapes = {k: (*before, rows, *after) for k, rows in put.sizes.items()}
        lead = put_dim if put_dim == taken_dim else 0
        if self.group is None:
            flight = Flight([outgoing[k] for k in shapes], [], [])
        elif self._lands_in_place(shapes, x, lead):
            whole = x.new_empty((*before, put.size, *after))
            landing = Landing(shapes, x, _take(put, whole, put_dim), lead, self.lane)
            flight = transport.launch(outgoing, landing, self.group)
            flight.whole = whole
        else:
            landing = Landing(shapes, x, lead=lead, lane=self.lane, even=self.even)
            flight = transport.launch(outgoing, landing, self.group)
        if not shapes:
            flight.whole = x.new_zeros((*before, put.size, *after))
        return flight

    def _lands_in_place(self, shapes: Mapping[int, Shape], x: Tensor, lead: int) -> bool:
        """Whether everything that arrives can be received where it stays."""
        put, put_dim = self.arrive
        if not put.laid_out or x.device.type != "cpu":
            return False
        coming = [shape for k, shape in shapes.items() if k != self.me]
        return all(
            prod(shape[:put_dim]) == 1 or transport.in_slices(shape, lead, x.dtype)
            for shape in coming
        )

    def land(self, flight: Flight) -> Tensor:
        """Wait for the rows and put them together."""
        parts = flight.wait()
        if flight.whole is not None:
            return flight.whole
        return _assemble(self.arrive[0], parts, self.arrive[1], self.me)


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum of one term a rank by torch's own all-reduce: replicated, so its gradient is a term."""

    group: ProcessGroup

    @property
    def reverse(self) -> "Sum":
        """The sum of the gradients."""
        return self

    def launch(self, x: Tensor) -> Flight:
        """Send this rank's term on its way."""
        return transport.launch_sum(x, self.group)

    def land(self, flight: Flight) -> Tensor:
        """Wait for the sum."""
        return flight.wait()[0]


@dataclass(frozen=True, eq=False)
class SumInParts:
    """A sum that is carried out in group order, by parts: each rank sums one and sends it on.

    As many bytes as an all-reduce sends, and what is summed is rounded once.

    Attributes:
      scatter: brings the terms of each part to the rank that sums it.
      gather: brings the parts to all ranks.
      shape: of the terms.
    """

    scatter: Swap
    gather: Swap
    shape: torch.Size

    @classmethod
    def of(cls, x: Tensor, group: ProcessGroup) -> "SumInParts":
        """The sum of tensors like this one."""
        moves = _parts_moves(group.size(), group.rank())
        there = _swap((0, 0), moves, group)
        return cls(there, _swap((0, 0), moves.reverse, group), x.shape)

    def cut(self, x: Tensor) -> Tensor:
        """A term as one row a rank, filled up with zeros."""
        ranks = len(self.scatter.leave[0].rows)
        flat = x.reshape(-1)
        block = -(-flat.numel() // ranks)
        missing = ranks * block - flat.numel()
        return (F.pad(flat, (0, missing)) if missing else flat).view(ranks, block)

    def join(self, rows: Tensor) -> Tensor:
        """The rows as one tensor again."""
        return rows.reshape(-1)[: self.shape.numel()].view(self.shape)


@cache
def _parts_moves(ranks: int, me: int) -> Moves:
    """Row k of each rank goes to rank k."""
    send = {k: np.arange(k, k + 1) for k in range(ranks)}
    receive = dict.fromkeys(range(ranks), np.arange(1))
    return Moves(me, send, receive, ranks, 1, local=False, even=Even.SCATTER)


@runtime_checkable
class Trip(Protocol):
    """A way of tensors between ranks, and the way of their gradients back."""

    @property
    def reverse(self) -> "Trip":
        """The way of the gradients."""
        ...

    def launch(self, x: Tensor) -> Flight:
        """Send a tensor on its way."""
        ...

    def land(self, flight: Flight) -> Tensor:
        """Wait for what comes."""
        ...


def exchange_rows(
    x: Shaped[Tensor, "..."], dim: int, moves: Moves, group: ProcessGroup | None
) -> Shaped[Tensor, "..."]:
    """Bring rows along one dim to the ranks that want them.

    Args:
      x: the local tensor; zero rows are fine.
      dim: the dim that the moves index.
      moves: this rank's moves.
      group: the ranks of the moves; may be None where ``moves.local``.
    Returns: the rows that this rank wants, in order; same dtype.
    Raises: LayoutError if the tensor does not have the rows that the moves were planned for, or
      moves that are not local get no group.
    """
    return move_rows(x, (dim % x.ndim, dim % x.ndim), moves, group)


def move_rows(
    x: Shaped[Tensor, "..."], dims: tuple[int, int], moves: Moves, group: ProcessGroup | None
) -> Shaped[Tensor, "..."]:
    """Cut a tensor along one dim, send the pieces, and put what comes together along another.

    Args:
      x: the local tensor.
      dims: the dim that ``moves.send`` indexes and the dim that ``moves.receive`` indexes.
      moves: this rank's moves.
      group: the ranks of the moves; may be None where ``moves.local``.
    Returns: a new tensor (the input itself where nothing changes), same dtype.
    Raises: LayoutError if the tensor does not have the rows that the moves were planned for, or
      moves that are not local get no group.
    """
    trip = swap(x, dims, moves, group)
    if trip is None:
        return x.detach() if x.requires_grad and not torch.is_grad_enabled() else x
    return travel(x, trip)


def swap(x: Tensor, dims: tuple[int, int], moves: Moves, group: ProcessGroup | None) -> Swap | None:
    """The swap of ``move_rows``, checked; None where the tensor stays as it is.

    A rank that has nothing to exchange takes its lane all the same, as the others of its group do;
    on the CPU, where ranks exchange messages, it has nothing more to do.
    """
    rows = x.shape[dims[0]]
    if rows != moves.rows:
        raise LayoutError(f"moves planned for {moves.rows} rows got {rows} along dim {dims[0]}")
    if group is None and not moves.local:
        raise LayoutError("rows move between ranks, so a process group is needed")
    idle = moves.still and (moves.local or x.device.type == "cpu")
    trip = _swap(dims, moves, None if moves.local else group)
    return None if idle else trip


def _swap(dims: tuple[int, int], moves: Moves, group: ProcessGroup | None) -> Swap:
    """A swap with a lane of its own."""
    leave, arrive = (moves.outgoing, dims[0]), (moves.incoming, dims[1])
    lane = transport.NO_LANE if group is None else transport.new_lane(group)
    return Swap(leave, arrive, group, moves.me, lane, moves.even)


def all_reduce(x: Shaped[Tensor, "..."], group: ProcessGroup) -> Shaped[Tensor, "..."]:
    """Sum a tensor over the ranks of a group; the backward sums the gradients likewise.

    Args:
      x: this rank's term.
      group: the ranks that hold terms.
    Returns: a new tensor with the sum, same dtype and the same bits on all ranks; of half
      precision it is summed in fp32, in group order, and rounded once.
    """
    large = x.device.type == "cpu" and x.nbytes >= LARGE_SUM
    if sum_dtype(x.dtype) == x.dtype and not large:
        return travel(x, Sum(group))
    parts = SumInParts.of(x, group)
    return parts.join(travel(travel(parts.cut(x), parts.scatter), parts.gather))


class _Travel(torch.autograd.Function):
    """A trip whose backward is the reverse trip."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: Trip) -> Tensor:
        ctx.back = trip.reverse
        return trip.land(trip.launch(x))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return travel(grad_outputs[0], ctx.back), None


def travel(x: Tensor, trip: Trip) -> Tensor:
    """Make a trip; autograd hears of it only where it has to, for that takes its time."""
    if (x.requires_grad and torch.is_grad_enabled()) or _has_tangent(x):
        return cast("Tensor", _Travel.apply(x, trip))
    return trip.land(trip.launch(x))


def _has_tangent(x: Tensor) -> bool:
    """Whether a forward-mode derivative goes along with a tensor; trips refuse to leave it out."""
    return cast("Any", forward_ad).unpack_dual(x).tangent is not None


def _take(positions: Positions, x: Tensor, dim: int) -> dict[int, Tensor]:
    """The rows of each member; views where they are consecutive."""
    sizes = positions.sizes
    if positions.ordered:
        parts = cast("tuple[Tensor, ...]", x.split(list(sizes.values()), dim)) if sizes else ()
        return dict(zip(sizes, parts, strict=True))
    if positions.everywhere:
        return dict.fromkeys(sizes, x)
    return {
        member: x.index_select(dim, _index(positions, member, x.device))
        if start is None
        else x.narrow(dim, start, sizes[member])
        for member, start in positions.starts.items()
    }


def _assemble(positions: Positions, parts: Sequence[Tensor], dim: int, me: int) -> Tensor:
    """A new tensor from one part per member; rows that meet are summed, others are zero.

    Sums run in group order, in fp32 for half-precision parts. Whole sums are taken in the memory
    of a part that came from another member; this rank's own part is left as it is.
    """
    if positions.ordered:
        return torch.cat(list(parts), dim)
    shape, dtype = list(parts[0].shape), parts[0].dtype
    shape[dim] = positions.size
    total = dtype if positions.once else sum_dtype(dtype)
    if positions.everywhere:
        first, second = (part.to(total) for part in parts[:2])
        out = second.add_(first) if me in [*positions.rows][:1] else first.add_(second)
        for part in parts[2:]:
            out.add_(_term(part, total))
        return out.to(dtype)
    out = parts[0].new_empty(shape) if positions.once else parts[0].new_zeros(shape, dtype=total)
    for (member, start), part in zip(positions.starts.items(), parts, strict=True):
        if start is not None:
            place = out.narrow(dim, start, positions.sizes[member])
            place.copy_(part) if positions.once else place.add_(_term(part, total))
        else:
            index = _index(positions, member, out.device)
            put = out.index_copy_ if positions.once else out.index_add_
            put(dim, index, part.to(out.dtype))
    return out.to(dtype)


def _term(part: Tensor, total: torch.dtype) -> Tensor:
    """A term as it is added to a sum; of 8 bits it is widened first, which torch does not do."""
    return part.to(total) if part.is_floating_point() and part.dtype.itemsize == 1 else part


def _index(positions: Positions, member: int, device: torch.device) -> Tensor:
    """One member's positions as a tensor, kept for the next time."""
    return Index(positions.rows[member], positions.copies.setdefault(member, {})).on(device)


def indices_of(moves: Moves) -> list[Index]:
    """What carrying moves out, and back, indexes tensors by."""
    return [
        Index(side.rows[member], side.copies.setdefault(member, {}))
        for side in (moves.outgoing, moves.incoming)
        if not (side.ordered or side.everywhere)
        for member, start in side.starts.items()
        if start is None
    ]
