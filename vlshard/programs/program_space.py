"""The states between two layouts, the steps that lead from one to another, and what each costs.

A state is the cuts of each dim, as ``dim_space`` allows them, and the axes over which a sum is
pending, over the axes that the two sides name. What leads from one to another:

- ``AllGather`` undoes a cut that applies last on its dim, or last on its part of a fused dim;
- ``Slice`` cuts a dim over axes that nothing uses, as its last cut;
- ``AllToAll`` undoes the last cut of one dim and makes one over the same axes the last of another;
- ``ReduceScatter`` turns a pending sum into a last cut, ``AllReduce`` takes sums away;
- ``Exchange`` changes the cuts of one dim as ``dim_space`` says.

A step costs the bytes that the rank which sends most sends, at symbolic even sizes: with x the part
of the tensor that a rank has before and n the ranks of the step's axes, (n-1)x for an AllGather,
(n-1)x/n for a ReduceScatter or an AllToAll, 2(n-1)x/n for an AllReduce, nothing for a Slice, and
for an Exchange what ``exchange_cost`` counts. Costs are integers, in units in which all are whole.

Axes whose cuts are the same on both sides, from the first that applies on, stay where they are. Of
four movable axes and more only those are joined that a side joins, or sums over on the left alone.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import permutations
from math import lcm, prod
from typing import NamedTuple

from vlshard.language import Dim, MeshShape, Packing, label
from vlshard.programs.dim_space import MANY, DimSpace, Kind, frozen_cuts
from vlshard.programs.exchange_cost import ExchangeCost, symbolic_packing
from vlshard.programs.states import Axes, Cuts, State, used_axes
from vlshard.programs.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
)


class StepKind(IntEnum):
    """The kinds of steps, in the order in which they are preferred."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_TO_ALL = 2
    SLICE = 3
    ALL_REDUCE = 4
    EXCHANGE = 5


class Node(NamedTuple):
    """A state in numbers: the cuts of each dim, and the pending axes as bits."""

    dims: tuple[int, ...]
    pending: int


class Change(NamedTuple):
    """A step in numbers.

    Attributes:
      kind: which kind of step.
      axes: what it is over.
      dims: the dims that it changes, in the order of its class's fields.
      after: the state that it leads to.
      cost: what it costs; of an exchange at least.
    """

    kind: StepKind
    axes: Axes
    dims: tuple[int, ...]
    after: Node
    cost: int


class Cost(NamedTuple):
    """What is sent by the rank that sends most, and by all ranks together."""

    most: int
    total: int


class KnownDim(NamedTuple):
    """What is known of a dim beside its cuts: how it is made, and the pack if it is given."""

    dim: Dim
    kind: Kind
    packing: Packing | None = None


class ProgramSpace:
    """The states between two sides, in numbers, and the steps between them.

    Attributes:
      start: the state before.
      goal: the state after.
      ranks: ranks of all axes that the sides name, but for those pending on both.
    """

    def __init__(self, dims: Sequence[KnownDim], src: State, dst: State, mesh: MeshShape) -> None:
        """Number everything.

        Args:
          dims: what is known of the dims.
          src: the state before.
          dst: the state after; what is pending there is pending before, too.
          mesh: the parts of the mesh and their ranks.
        """
        sides = list(zip(src.dims, dst.dims, strict=True))
        frozen = [frozen_cuts(dim.kind, *side) for dim, side in zip(dims, sides, strict=True)]
        staying = {axis for cuts in frozen for axis in used_axes([*cuts])}
        cuts = [cut for side in sides for some in side for cut in some]
        named = {*src.pending, *used_axes(cuts)} - {*dst.pending}
        self._mesh, self._sizes = mesh, mesh.parts
        self._axes = [axis for axis in mesh.parts if axis in named - staying]
        self._bits = {axis: 1 << i for i, axis in enumerate(self._axes)}
        self._spans: dict[int, int] = {}
        self._rests: dict[Node, tuple[int, int]] = {}
        self._still = prod(mesh.parts[axis] for axis in staying)
        self._left = dst.pending
        self.ranks = self._still * self._span(self._every)
        summed = tuple(axis for axis in src.pending if axis not in dst.pending)
        joins = _joins(self._axes, [summed, *(cut.axes for cut in cuts)])
        self._dims = [
            DimSpace(label(dim.dim), dim.kind, side, self._bits, joins)
            for dim, side in zip(dims, sides, strict=True)
        ]
        self._costs = [
            ExchangeCost(dim.dim, mesh.parts, _pack(dim, side, mesh))
            for dim, side in zip(dims, sides, strict=True)
        ]
        self._unit = self.ranks**2 * lcm(*(max(cost.rows, 1) for cost in self._costs))
        self._text: dict[tuple[StepKind, Axes, tuple[int, ...]], str] = {}
        self._step: dict[str, Step] = {}
        self._alike = sorted(
            (space.label, i)
            for i, space in enumerate(self._dims)
            if space.kind in (Kind.PLAIN, Kind.FUSED) and sides[i] == ((), ())
        )
        self.start, self.goal = self._node(src), self._node(dst)
        self._goal_masks = self._masks(self.goal)
        self._placed = sum(self._goal_masks)

    # ------------------------------------------------------------ numbers

    @property
    def _every(self) -> int:
        """All movable axes."""
        return (1 << len(self._axes)) - 1

    def _node(self, state: State) -> Node:
        """A state in numbers."""
        numbers = [space.number(cuts) for space, cuts in zip(self._dims, state.dims, strict=True)]
        pending = sum(self._bits[axis] for axis in state.pending if axis in self._bits)
        return Node(tuple(numbers), pending)

    def state(self, node: Node) -> State:
        """The state of a node."""
        pending = {*self._left, *self._named(node.pending)}
        dims = tuple(space.cuts(n) for space, n in zip(self._dims, node.dims, strict=True))
        return State(dims, tuple(axis for axis in self._sizes if axis in pending))

    def _masks(self, node: Node) -> list[int]:
        """The movable axes that cut each dim, as bits."""
        return [space.mask(n) for space, n in zip(self._dims, node.dims, strict=True)]

    def _named(self, mask: int) -> Axes:
        """The axes of bits, in mesh order."""
        return tuple(axis for axis in self._axes if self._bits[axis] & mask)

    def _span(self, mask: int) -> int:
        """Ranks of axes given as bits."""
        if mask not in self._spans:
            self._spans[mask] = prod(self._sizes[axis] for axis in self._named(mask))
        return self._spans[mask]

    def _share(self, mask: int) -> int:
        """What a rank has of the tensor if it is cut over some axes, and those that stay."""
        return self._unit // (self._still * self._span(mask))

    # ------------------------------------------------------------ steps

    def text(self, change: Change, before: Node) -> str:
        """A change as its step writes itself."""
        axes = (
            self._exchange_axes(change, before) if change.kind is StepKind.EXCHANGE else change.axes
        )
        key = (change.kind, axes, change.dims)
        if key not in self._text:
            step = self._made(change, axes)
            self._text[key] = str(step)
            self._step[str(step)] = step
        return self._text[key]

    def step(self, text: str) -> Step:
        """The step that a text is of."""
        return self._step[text]

    def _made(self, change: Change, axes: Axes) -> Step:
        """The step of a change."""
        over = self._mesh.text(axes)
        match change.kind, [self._dims[i].label for i in change.dims]:
            case StepKind.ALL_GATHER, [dim]:
                return AllGather(over, dim)
            case StepKind.REDUCE_SCATTER, [dim]:
                return ReduceScatter(over, dim)
            case StepKind.ALL_TO_ALL, [src, dst]:
                return AllToAll(over, src, dst)
            case StepKind.SLICE, [dim]:
                return Slice(over, dim)
            case StepKind.ALL_REDUCE, []:
                return AllReduce(over)
            case StepKind.EXCHANGE, [dim]:
                return Exchange(tuple(over.strip("()").split()), dim)
            case _:
                raise AssertionError(f"a {change.kind.name} of {len(change.dims)} dims")

    def _exchange_axes(self, change: Change, before: Node) -> Axes:
        """The axes of the cuts that an exchange changes: not those that both begin with."""
        (i,) = change.dims
        have, want = (self._dims[i].cuts(node.dims[i]) for node in (before, change.after))
        same = 0
        while same < min(len(have), len(want)) and have[same] == want[same]:
            same += 1
        used = {*used_axes(have[same:]), *used_axes(want[same:])}
        return tuple(axis for axis in self._sizes if axis in used)

    def changes(self, node: Node) -> Iterator[Change]:
        """All steps from a state."""
        masks = self._masks(node)
        used = sum(masks)
        share, free = self._share(used), self._every & ~used & ~node.pending
        targets = self._targets(node)
        for i in range(len(self._dims)):
            yield from self._undone(node, i, share, targets)
            for number in self._dims[i].exchanges(node.dims[i], free):
                after, mask = _put(node, i, number), self._dims[i].mask(number)
                gained = self._share(used - masks[i] + mask) - self._share(used | mask)
                yield Change(StepKind.EXCHANGE, (), (i,), after, gained)
        for i in targets:
            for axes, mask, number in self._dims[i].longer(node.dims[i]):
                after = _put(node, i, number)
                if not mask & ~free:
                    yield Change(StepKind.SLICE, axes, (i,), after, 0)
                elif not mask & ~node.pending:
                    after = after._replace(pending=node.pending & ~mask)
                    cost = share - share // self._span(mask)
                    yield Change(StepKind.REDUCE_SCATTER, axes, (i,), after, cost)
        some = node.pending
        while some:
            cost = 2 * (share - share // self._span(some))
            after = node._replace(pending=node.pending & ~some)
            yield Change(StepKind.ALL_REDUCE, self._named(some), (), after, cost)
            some = (some - 1) & node.pending

    def _undone(self, node: Node, i: int, share: int, targets: Sequence[int]) -> Iterator[Change]:
        """The gathers of a dim, and the all-to-alls from it."""
        for axes, mask, number in self._dims[i].shorter(node.dims[i]):
            ranks, less = self._span(mask), _put(node, i, number)
            yield Change(StepKind.ALL_GATHER, axes, (i,), less, (ranks - 1) * share)
            for j in targets:
                if j != i:
                    for edge in self._dims[j].longer(node.dims[j]):
                        if edge.axes == axes:
                            after = _put(less, j, edge.cuts)
                            yield Change(
                                StepKind.ALL_TO_ALL, axes, (i, j), after, share - share // ranks
                            )

    def _targets(self, node: Node) -> list[int]:
        """The dims that may get a cut more.

        Of dims that nothing cuts, on neither side nor now, one is like another: the first by text.
        """
        empty = [i for _, i in self._alike if not self._dims[i].cuts(node.dims[i])]
        return [i for i in range(len(self._dims)) if i not in empty[1:]]

    def counted(self, before: Node, after: Node) -> Cost:
        """What the exchange between two states costs."""
        pairs = zip(before.dims, after.dims, strict=True)
        i = next(i for i, (a, b) in enumerate(pairs) if a != b)
        have, want = (self._dims[i].cuts(node.dims[i]) for node in (before, after))
        rows = self._costs[i].sent(have, want)
        own = prod(self._sizes[axis] for axis in used_axes(have))
        group = prod(self._sizes[axis] for axis in {*used_axes(have), *used_axes(want)})
        # What a rank has of the other dims, for one row of this one.
        row = self._share(sum(self._masks(before))) * own // max(self._costs[i].rows, 1)
        return Cost(rows.most * row, rows.total * row * self.ranks // group)

    # ------------------------------------------------------------ what is left to do

    def rest(self, node: Node) -> tuple[int, int]:
        """What is still to be sent at least, and in how many steps at least.

        A rank has to gain what it lacks of its part. Axes that belong on other dims leave theirs
        in one all-to-all a dim at least, and come to the others so; sums are reduced. All that is
        done at least with the smallest part that a rank can have.
        """
        if node not in self._rests:
            masks, goal = self._masks(node), self._goal_masks
            gain = max(0, self._share(self._placed) - self._share(sum(masks)))
            placed = self._placed & sum(masks)
            leaving = [m & placed & ~g for m, g in zip(masks, goal, strict=True)]
            coming = [g & placed & ~m for m, g in zip(masks, goal, strict=True)]
            moved = max(self._least(leaving), self._least(coming))
            differ = sum(a != b for a, b in zip(node.dims, self.goal.dims, strict=True))
            steps = max((differ + 1) // 2, sum(map(bool, leaving)), sum(map(bool, coming)))
            self._rests[node] = (
                gain + moved + self._least([node.pending]),
                steps or bool(node.pending),
            )
        return self._rests[node]

    def _least(self, masks: Sequence[int]) -> int:
        """What one all-to-all over each of some sets of axes sends at least."""
        part = self._unit // self.ranks
        return sum(part - part // self._span(mask) for mask in masks if mask)


def _put(node: Node, dim: int, number: int) -> Node:
    """A state with other cuts of a dim."""
    return Node((*node.dims[:dim], number, *node.dims[dim + 1 :]), node.pending)


def _pack(dim: KnownDim, sides: tuple[Cuts, Cuts], mesh: MeshShape) -> Packing | None:
    """The Packing of a packed dim; a symbolic one if none with rows is given."""
    if dim.kind is not Kind.PACKED:
        return None
    given = dim.packing if dim.packing and dim.packing.rows else None
    return given or symbolic_packing(sides, mesh.parts)


def _joins(axes: Sequence[str], written: Sequence[Axes]) -> list[Axes]:
    """The axes that one cut may be over."""
    if len(axes) < MANY:
        return [some for n in range(1, len(axes) + 1) for some in permutations(axes, n)]
    joined = [some for some in written if len(some) > 1 and {*some} <= {*axes}]
    return [*((axis,) for axis in axes), *dict.fromkeys(joined)]
