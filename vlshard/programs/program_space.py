"""The states between two layouts, the steps that lead from one to another, and what each costs.

A state is the cuts of each dim, as ``dim_space`` allows them, and the axes over which a sum is
pending, over the axes that the two sides name. What leads from one to another:

- ``AllGather`` undoes the last cuts of a dim, ``Slice`` makes such over axes that nothing uses;
- ``AllToAll`` undoes the last cuts of one dim and makes such of another over the same axes, in any
  order of them;
- ``ReduceScatter`` turns pending sums into last cuts, ``AllReduce`` takes sums away;
- ``Exchange`` changes the cuts of one dim.

A step costs the bytes that the rank which sends most sends, at symbolic even sizes: with x the part
of the tensor that a rank has before and n the ranks of the step's axes, (n-1)x for an AllGather,
(n-1)x/n for a ReduceScatter or an AllToAll, 2(n-1)x/n for an AllReduce, nothing for a Slice, and
for an Exchange what ``exchange_cost`` counts. A program costs the sum of its steps. Costs are
integers, in units in which all are whole; the sizes do not depend on the sides, so the programs of
different sides compare.

By ``narrow`` rules, for many axes, cuts that both sides have, and before which nothing changes,
stay; and fewer axes are joined (``dim_space`` says which).
"""

from collections.abc import Iterator, Sequence
from math import lcm, prod

from vlshard.language import MeshShape
from vlshard.programs.changes import Change, Cost, Node, StepKind
from vlshard.programs.dim_space import Kind, frozen_cuts
from vlshard.programs.remaining import SMALL, Remaining
from vlshard.programs.rules import (
    KnownDim,
    dim_space_of,
    exchange_cost_of,
    joins_of,
    pack_of,
    rules_of,
)
from vlshard.programs.states import Axes, State, changed_axes, used_axes

# What it takes to count an exchange, in steps that are only looked at: of few rows, else, and over
# many ranks.
QUICK, COUNTED, COUNTED_LONG = 5, 20, 400


class ProgramSpace:
    """The states between two sides, in numbers, and the steps between them.

    A node is the number of each dim's cuts, and the pending axes as bits.

    Attributes:
      start: the state before.
      goal: the state after.
      ranks: ranks of all axes that the sides name, but for those pending on both.
      dims: the cuts that each dim may have.
      axes: those that may move.
      bits: a bit for each of them.
      unit: what the whole tensor counts.
      parts: the parts of the mesh and their ranks.
    """

    def __init__(
        self, dims: Sequence[KnownDim], src: State, dst: State, mesh: MeshShape, *, narrow: bool
    ) -> None:
        """Number everything.

        Args:
          dims: what is known of the dims.
          src: the state before; contiguous cuts are one for each axis.
          dst: the state after, so too; what is pending there is pending before, too.
          mesh: the parts of the mesh and their ranks.
          narrow: whether the rules for many axes hold.
        """
        sides = list(zip(src.dims, dst.dims, strict=True))
        named = {*src.pending, *(a for side in sides for cuts in side for a in used_axes(cuts))}
        named -= {*dst.pending}
        frozen = [frozen_cuts(dim.kind, *side) for dim, side in zip(dims, sides, strict=True)]
        staying = {a for cuts in frozen for a in used_axes([*cuts])} if narrow else set[str]()
        self._known, self._mesh, self.parts = dims, mesh, mesh.parts
        self._texts: dict[Axes, str] = {}
        self._play = tuple(axis for axis in mesh.parts if axis in named)
        self.axes = tuple(axis for axis in self._play if axis not in staying)
        self.bits = {axis: 1 << i for i, axis in enumerate(self.axes)}
        self._left = dst.pending
        self._spans: dict[int, int] = {0: 1}
        self.ranks = prod(mesh.parts[axis] for axis in self._play)
        self._still = prod(mesh.parts[axis] for axis in staying)
        joins = joins_of(self.axes, sides, src.pending, dst.pending) if narrow else None
        self._groups = None if joins is None else self._grouped(joins)
        ranks = tuple(mesh.parts.items())
        self.dims = [
            dim_space_of(rules_of(dim, side, self.axes, ranks, joins))
            for dim, side in zip(dims, sides, strict=True)
        ]
        self._costs = [
            exchange_cost_of(dim.dim, ranks, pack_of(dim, side, mesh))
            for dim, side in zip(dims, sides, strict=True)
        ]
        rows = [max(cost.rows, 1) for cost in self._costs]
        self.unit = self.ranks**2 * lcm(*rows)
        self._changed: list[dict[tuple[int, int], Axes]] = [{} for _ in dims]
        self._rows: list[dict[tuple[int, int], Cost]] = [{} for _ in dims]
        self._shares: dict[int, int] = {}
        self._alike = [
            i
            for _, i in sorted((dim.label, i) for i, dim in enumerate(dims))
            if dims[i].kind in (Kind.PLAIN, Kind.FUSED) and sides[i] == ((), ())
        ]
        self.start, self.goal = self._node(src), self._node(dst)
        left = Remaining(
            self.dims,
            self._costs,
            self.goal,
            parts=self.parts,
            bits=self.bits,
            ranks=self.ranks,
            unit=self.unit,
            wanted=self._share(sum(self._masks(self.goal))),
        )
        self.rest, self.hoped = left.rest, left.hoped

    # ------------------------------------------------------------ numbers

    def _node(self, state: State) -> Node:
        """A state in numbers."""
        numbers = [space.number(cuts) for space, cuts in zip(self.dims, state.dims, strict=True)]
        return (*numbers, sum(self.bits.get(axis, 0) for axis in state.pending))

    def state(self, node: Node) -> State:
        """The state of a node."""
        pending = {*self._left, *self.named(node[-1])}
        dims = tuple(space.cuts(n) for space, n in zip(self.dims, node, strict=False))
        return State(dims, tuple(axis for axis in self.parts if axis in pending))

    def _masks(self, node: Node) -> list[int]:
        """The movable axes that cut each dim, as bits."""
        return [space.mask(n) for space, n in zip(self.dims, node, strict=False)]

    def named(self, mask: int) -> Axes:
        """The axes of bits, in mesh order."""
        return tuple(axis for axis in self.axes if self.bits[axis] & mask)

    def _span(self, mask: int) -> int:
        """Ranks of axes given as bits."""
        found = self._spans.get(mask)
        if found is None:
            found = self._spans[mask] = prod(self.parts[axis] for axis in self.named(mask))
        return found

    def _share(self, mask: int) -> int:
        """What a rank has of the tensor if it is cut over some axes, and those that stay."""
        found = self._shares.get(mask)
        if found is None:
            found = self._shares[mask] = self.unit // (self._still * self._span(mask))
        return found

    def _grouped(self, joins: Sequence[Axes]) -> tuple[int, ...]:
        """The sets of axes that one step may be over, as bits."""
        every = sum(self.bits.values())
        joined = [sum(self.bits[axis] for axis in some) for some in joins]
        return tuple(dict.fromkeys([*self.bits.values(), *joined, every]))

    def _subsets(self, mask: int) -> Iterator[int]:
        """The sets of some axes that one step may be over, as bits."""
        if self._groups is not None:
            yield from (group for group in self._groups if not group & ~mask)
            if mask and mask not in self._groups:
                yield mask
            return
        some = mask
        while some:
            yield some
            some = (some - 1) & mask

    # ------------------------------------------------------------ steps

    def text(self, before: Node, change: Change) -> tuple[str, ...]:
        """A change as it counts among others that cost as much: as its step writes itself."""
        axes = change.axes
        if change.kind == StepKind.EXCHANGE:
            axes = self._exchange_axes(before, change.after, change.dims[0])
        over = self._texts.get(axes)
        if over is None:
            over = self._texts[axes] = self._mesh.text(axes)
        over = over.strip("()") if change.kind == StepKind.EXCHANGE else over
        labels = [self._known[i].label for i in change.dims]
        return (*labels, over, *[self.dims[i].text(change.after[i]) for i in change.dims])

    def free(self, node: Node) -> int:
        """The axes that nothing uses, as bits."""
        return sum(self.bits.values()) & ~sum(self._masks(node)) & ~node[-1]

    def cost(self, kind: StepKind, before: Node, mask: int) -> int:
        """What a step over some axes, as bits, costs; no exchange."""
        share, ranks = self._share(sum(self._masks(before))), self._span(mask)
        once = share - share // ranks
        return {
            StepKind.ALL_GATHER: (ranks - 1) * share,
            StepKind.REDUCE_SCATTER: once,
            StepKind.ALL_TO_ALL: once,
            StepKind.SLICE: 0,
            StepKind.ALL_REDUCE: 2 * once,
        }[kind]

    def _exchange_axes(self, before: Node, after: Node, i: int) -> Axes:
        """The axes of the cuts that an exchange changes."""
        key = before[i], after[i]
        found = self._changed[i].get(key)
        if found is None:
            have, want = (self.dims[i].cuts(number) for number in key)
            found = self._changed[i][key] = changed_axes(have, want, self.parts)
        return found

    def changes(self, node: Node) -> Iterator[Change]:
        """All steps from a state but exchanges."""
        masks, pending = self._masks(node), node[-1]
        used = sum(masks)
        share, free = self._share(used), sum(self.bits.values()) & ~used & ~pending
        targets = self._targets(node)
        landings = [(i, node[:i], node[i], node[i + 1 :], self.dims[i]) for i in targets]
        for i, mask in enumerate(masks):
            if not mask:
                continue
            for axes, moved, left in self.dims[i].undone(node[i]):
                ranks, less = self._span(moved), _put(node, i, left)
                yield Change(0, axes, (i,), less, (ranks - 1) * share)
                cost = share - share // ranks
                for j, *_, space in landings:
                    if j != i:
                        for _, number in space.landed(node[j], moved):
                            yield Change(2, axes, (i, j), _put(less, j, number), cost)
        for some in self._subsets(free):
            for i, front, own, back, space in landings:
                for axes, number in space.landed(own, some):
                    yield Change(3, axes, (i,), (*front, number, *back), 0)
        for some in self._subsets(pending):
            cost = share - share // self._span(some)
            summed = pending & ~some
            for i, _, own, _, space in landings:
                for axes, number in space.landed(own, some):
                    after = (*node[:i], number, *node[i + 1 : -1], summed)
                    yield Change(1, axes, (i,), after, cost)
            yield Change(4, self.named(some), (), (*node[:-1], summed), 2 * cost)

    def exchangeable(self, node: Node) -> list[int]:
        """The dims whose cuts an exchange may change."""
        masks = self._masks(node)
        free = sum(self.bits.values()) & ~sum(masks) & ~node[-1]
        found: list[int] = []
        for i, space in enumerate(self.dims):
            if masks[i] and (space.rules.kind is not Kind.PLAIN or space.rules.orders):
                found.append(i)
            elif masks[i] and (masks[i] | free).bit_count() > 1:
                found.append(i)
        return found

    def exchanges(self, node: Node, i: int) -> Iterator[Change]:
        """The exchanges of a dim; what each costs at least."""
        masks = self._masks(node)
        used, space = sum(masks), self.dims[i]
        free = sum(self.bits.values()) & ~used & ~node[-1]
        for number in space.exchanged(node[i], free):
            after, mask = _put(node, i, number), space.mask(number)
            gained = self._share(used - masks[i] + mask) - self._share(used | mask)
            yield Change(5, (), (i,), after, gained)

    def _targets(self, node: Node) -> list[int]:
        """The dims that may get a cut more.

        Of dims that nothing cuts, on neither side nor now, one is like another: the first by text.
        """
        empty = [i for i in self._alike if not self.dims[i].cuts(node[i])][1:]
        return [
            i
            for i, space in enumerate(self.dims)
            if i not in empty and space.rules.kind is not Kind.FIXED
        ]

    def price(self, before: Node, after: Node, i: int) -> int:
        """What it takes to count an exchange, in steps that are only looked at; 0 the next time."""
        key = before[i], after[i]
        if key in self._rows[i]:
            return 0
        space = self.dims[i]
        if self._costs[i].quick(space.cuts(before[i]), space.cuts(after[i])):
            return QUICK
        used = {*space.used(before[i]), *space.used(after[i])}
        group = prod(self.parts[axis] for axis in used)
        return COUNTED if group <= SMALL else COUNTED_LONG

    def counted(self, before: Node, after: Node, i: int) -> Cost:
        """What the exchange of a dim between two states costs."""
        key = before[i], after[i]
        found = self._rows[i].get(key)
        if found is None:
            space = self.dims[i]
            rows = self._costs[i].sent(*(space.cuts(number) for number in key))
            own, used = space.span(key[0]), {*space.used(key[0]), *space.used(key[1])}
            times = self.ranks // prod(self.parts[axis] for axis in used)
            found = self._rows[i][key] = Cost(rows.most * own, rows.total * own * times)
        # What a rank has of the tensor, for one row of this dim.
        share, rows = self._share(sum(self._masks(before))), max(self._costs[i].rows, 1)
        return Cost(share * found.most // rows, share * found.total // rows)


def _put(node: Node, dim: int, number: int) -> Node:
    """A state with other cuts of a dim."""
    return (*node[:dim], number, *node[dim + 1 :])
