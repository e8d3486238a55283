"""Differentiable moves of rows between ranks, planned on the host by global index.

A ``Moves`` says, for each member of a group, which local rows it is sent and where the rows that
come from it go. Gather, scatter, slice, all-to-all and uneven exchange are all such moves; the
backward runs them the other way and sums where a row went to several places.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from vlshard import transport
from vlshard.header import IntArray


@dataclass(frozen=True, eq=False)
class Positions:
    """Where rows lie along a dim: for each group member its positions, as host integers."""

    members: tuple[IntArray, ...]
    size: int
    _tensors: dict[tuple[int, torch.device], Tensor] = field(
        default_factory=dict[tuple[int, torch.device], Tensor], repr=False
    )

    @cached_property
    def runs(self) -> tuple[bool, ...]:
        """Whether each member's positions are consecutive."""
        return tuple(bool((np.diff(rows) == 1).all()) for rows in self.members)

    @cached_property
    def once(self) -> bool:
        """Whether every row of the dim occurs exactly once."""
        count = np.bincount(np.concatenate(self.members), minlength=self.size)
        return bool((count == 1).all())

    @cached_property
    def ordered(self) -> bool:
        """Whether the members' positions, one after another, are 0, 1, 2, ..."""
        return np.array_equal(np.concatenate(self.members), np.arange(self.size))

    def index(self, member: int, device: torch.device) -> Tensor:
        """One member's positions as a tensor, kept for the next time."""
        key = (member, device)
        if key not in self._tensors:
            rows = np.ascontiguousarray(self.members[member], dtype=np.int64)
            self._tensors[key] = torch.from_numpy(rows).to(device)
        return self._tensors[key]

    def take(self, x: Tensor, dim: int, member: int) -> Tensor:
        """The rows of one member; a view where they are consecutive."""
        rows = self.members[member]
        if self.runs[member]:
            return x.narrow(dim, int(rows[0]) if rows.size else 0, rows.size)
        return x.index_select(dim, self.index(member, x.device))

    def assemble(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """A new tensor from one part per member; rows that meet are summed, others are zero.

        Sums run in group order, in fp32 for half-precision parts.
        """
        if self.ordered:
            return torch.cat(list(parts), dim)
        shape = list(parts[0].shape)
        shape[dim] = self.size
        if self.once:
            out = parts[0].new_empty(shape)
            for member, part in enumerate(parts):
                if self.runs[member]:
                    self.take(out, dim, member).copy_(part)
                else:
                    out.index_copy_(dim, self.index(member, part.device), part)
            return out
        dtype = parts[0].dtype
        total = parts[0].new_zeros(
            shape, dtype=torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        )
        for member, part in enumerate(parts):
            if self.runs[member]:
                self.take(total, dim, member).add_(part)
            else:
                total.index_add_(dim, self.index(member, part.device), part.to(total.dtype))
        return total.to(dtype)


@dataclass(frozen=True, eq=False)
class Moves:
    """Rows that one member of a group sends and receives.

    Attributes:
      me: this rank's place in the group.
      send: for each member, positions along the dim of the rows that it gets from here.
      receive: for each member, positions in the result of the rows that come from it.
      rows: rows of the input along the dim.
      size: rows of the result along the dim.
      local: whether nothing leaves any rank of the group; the same on all of them.
    """

    me: int
    send: tuple[IntArray, ...]
    receive: tuple[IntArray, ...]
    rows: int
    size: int
    local: bool

    @cached_property
    def outgoing(self) -> Positions:
        """What leaves, as positions in the input."""
        return Positions(self.send, self.rows)

    @cached_property
    def incoming(self) -> Positions:
        """What arrives, as positions in the result."""
        return Positions(self.receive, self.size)

    @cached_property
    def identity(self) -> bool:
        """Whether the result is the input."""
        return self.local and all(
            np.array_equal(rows[self.me], np.arange(size))
            for rows, size in ((self.send, self.rows), (self.receive, self.size))
        )

    @property
    def rows_sent(self) -> int:
        """Rows that go to other ranks in forward."""
        return sum(rows.size for k, rows in enumerate(self.send) if k != self.me)

    @property
    def rows_returned(self) -> int:
        """Rows whose gradients go to other ranks in backward."""
        return sum(rows.size for k, rows in enumerate(self.receive) if k != self.me)


def plan_moves(have: Sequence[IntArray], want: Sequence[IntArray], me: int) -> Moves:
    """Who sends which rows to whom, so that each rank gets the rows it wants.

    A row that several ranks want goes to each of them; of several holders, a rank takes its own
    copy, else the one of the lowest rank.

    Args:
      have: per group member, the global indices that it holds, in local order.
      want: per group member, the global indices that it shall hold, in local order.
      me: this rank's place in the group.
    Returns: the moves of this rank; those of all members fit together.
    Raises: ValueError if nobody holds a row that is wanted.
    """
    top = 1 + max((int(rows.max()) for rows in (*have, *want) if rows.size), default=-1)
    holder = np.full(top, -1)
    for member in reversed(range(len(have))):
        holder[have[member]] = member
    place = np.zeros(top, dtype=np.int64)
    place[have[me]] = np.arange(have[me].size)
    sources: list[IntArray] = []
    for member, rows in enumerate(want):
        own = np.zeros(top, dtype=bool)
        own[have[member]] = True
        sources.append(np.where(own[rows], member, holder[rows]))
    lost = sorted({int(i) for rows, s in zip(want, sources, strict=True) for i in rows[s < 0]})
    if lost:
        raise ValueError(f"rows {lost[:8]} are wanted, but no rank of the group holds them")
    members = range(len(have))
    return Moves(
        me=me,
        send=tuple(place[want[k][sources[k] == me]] for k in members),
        receive=tuple(np.flatnonzero(sources[me] == k) for k in members),
        rows=have[me].size,
        size=want[me].size,
        local=all(bool((source == k).all()) for k, source in enumerate(sources)),
    )


def _swap(
    x: Tensor,
    leave: tuple[Positions, int],
    arrive: tuple[Positions, int],
    group: ProcessGroup | None,
    me: int,
) -> Tensor:
    """Send rows taken along one dim and put what comes together along another (or the same)."""
    (taken, taken_dim), (put, put_dim) = leave, arrive
    outgoing = [taken.take(x, taken_dim, k) for k in range(len(taken.members))]
    shape = list(outgoing[me].shape)
    shapes: list[tuple[int, ...]] = []
    for rows in put.members:
        shape[put_dim] = rows.size
        shapes.append(tuple(shape))
    if group is not None:
        return put.assemble(transport.launch(outgoing, shapes, group).wait(), put_dim)
    parts = [outgoing[me] if k == me else x.new_empty(s) for k, s in enumerate(shapes)]
    return put.assemble(parts, put_dim)


class _MoveRows(torch.autograd.Function):
    """A swap whose backward is the reverse swap."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        leave: tuple[Positions, int],
        arrive: tuple[Positions, int],
        group: ProcessGroup | None,
        me: int,
    ) -> Tensor:
        ctx.reverse = (arrive, leave, group, me)
        return _swap(x, leave, arrive, group, me)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_MoveRows, grad_outputs[0], *ctx.reverse), None, None, None, None


def _apply(function: Any, *arguments: Any) -> Tensor:
    """``function.apply`` with its type."""
    return function.apply(*arguments)


def move_rows(
    x: Shaped[Tensor, "..."], dims: tuple[int, int], moves: Moves, group: ProcessGroup | None
) -> Shaped[Tensor, "..."]:
    """Cut a tensor along one dim, send the pieces, and put what comes together along another.

    Args:
      x: the local tensor.
      dims: the dim that ``moves.send`` indexes and the dim that ``moves.receive`` indexes.
      moves: this rank's moves.
      group: the ranks of the moves; None if they are local.
    Returns: a new tensor (the input itself where nothing changes), same dtype.
    Raises: ValueError if the tensor does not have the rows that the moves were planned for, or
      moves that are not local get no group.
    """
    rows = x.shape[dims[0]]
    if rows != moves.rows:
        raise ValueError(f"moves planned for {moves.rows} rows got {rows} along dim {dims[0]}")
    if moves.identity:
        return x
    if group is None and not moves.local:
        raise ValueError("rows move between ranks, so a process group is needed")
    leave, arrive = (moves.outgoing, dims[0]), (moves.incoming, dims[1])
    return _apply(_MoveRows, x, leave, arrive, None if moves.local else group, moves.me)


def exchange_rows(
    x: Shaped[Tensor, "..."], dim: int, moves: Moves, group: ProcessGroup | None
) -> Shaped[Tensor, "..."]:
    """Bring rows along one dim to the ranks that want them.

    Differentiable: the backward sends gradients back and sums where a row went to several ranks.

    Args:
      x: the local tensor; zero rows are fine.
      dim: the dim that the moves index.
      moves: this rank's moves.
      group: the ranks of the moves; may be None where ``moves.local``.
    Returns: the rows that this rank wants, in order; same dtype.
    Raises: ValueError if the tensor does not have the rows that the moves were planned for, or
      moves that are not local get no group.
    """
    return move_rows(x, (dim % x.ndim, dim % x.ndim), moves, group)


def bytes_per_row(shape: Sequence[int], dim: int, itemsize: int) -> int:
    """Bytes of one row of a tensor along a dim."""
    return itemsize * math.prod(size for k, size in enumerate(shape) if k != dim)
