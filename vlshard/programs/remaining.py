"""What is left to do from a state: at least, as the search needs it, and by a guess."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from vlshard.programs.changes import Node
from vlshard.programs.dim_space import DimSpace, Kind
from vlshard.programs.exchange_cost import ExchangeCost
from vlshard.programs.states import Cuts, begin_alike, used_axes

# Up to so many ranks of the axes that cut a dim its rows are counted.
SMALL = 1024


class Overlap(NamedTuple):
    """How much of what a rank has of a dim it wants, too.

    Attributes:
      mean: on average over ranks, in some unit.
      most: at most.
      axes: those whose places decide about it, as bits.
    """

    mean: int
    most: int
    axes: int


class Remaining:
    """What is left to do to come to a state, the goal."""

    def __init__(
        self,
        dims: Sequence[DimSpace],
        costs: Sequence[ExchangeCost],
        goal: Node,
        *,
        parts: Mapping[str, int],
        bits: Mapping[str, int],
        ranks: int,
        unit: int,
        wanted: int,
    ) -> None:
        """Prepare.

        Args:
          dims: the cuts that each dim may have.
          costs: what exchanges of each cost.
          goal: the state after.
          parts: the parts of the mesh and their ranks.
          bits: a bit for each axis that may move.
          ranks: ranks of all axes that the sides name, but for those pending on both.
          unit: what the whole tensor counts.
          wanted: what of it a rank has in the end.
        """
        self._dims, self._costs, self._goal = dims, costs, goal
        self._parts, self._bits, self._ranks, self._unit = parts, bits, ranks, unit
        self._wanted = wanted
        self._goal_masks = [space.mask(n) for space, n in zip(dims, goal, strict=False)]
        self._wholes = [ranks * max(cost.rows, 1) for cost in costs]
        self._whole = prod(self._wholes)
        self._overlaps: list[dict[int, Overlap]] = [{} for _ in dims]
        self._hopes: list[dict[int, int]] = [{} for _ in dims]
        self._found: dict[Node, tuple[int, int]] = {}

    def rest(self, node: Node) -> tuple[int, int]:
        """What is still to be sent at least, and in how many steps at least.

        Each element must come to the ranks that want it and do not have it, in one message each;
        the T terms of a sum, of which W ranks want the result, meet in T - 1 messages and go out
        in W - 1; one more if no rank that wants the sum has a term. A rank sends the mean of all
        messages at least.
        """
        found = self._found.get(node)
        if found is None:
            have = self._kept(node)
            if node[-1]:
                part = self._unit // self._ranks
                ranks = prod(self._parts[a] for a, bit in self._bits.items() if bit & node[-1])
                cost = self._wanted + (ranks - 2) * part + max(0, part - have)
            else:
                cost = self._wanted - have
            found = self._found[node] = (max(cost, 0), self._steps(node))
        return found

    def _kept(self, node: Node) -> int:
        """What a rank has of the tensor and wants, on average at most."""
        product, met = self._unit, 0
        for i, number in enumerate(node[:-1]):
            known = self._overlaps[i].get(number)
            if known is None:
                known = self._overlaps[i][number] = self._overlap(i, number)
            product *= known.most if known.axes & met else known.mean
            met |= known.axes
        return -(-product // self._whole)

    def _overlap(self, i: int, number: int) -> Overlap:
        """What a rank has of a dim and wants, in a fraction of ``self._wholes``."""
        space, whole, goal = self._dims[i], self._wholes[i], self._goal[i]
        have, want = space.cuts(number), space.cuts(goal)
        wanted = space.span(goal)
        most, same = whole // max(space.span(number), wanted), begin_alike(have, want)
        if same in (len(have), len(want)):
            return Overlap(most, most, 0)
        old, new = {*used_axes(have[same:])}, {*used_axes(want[same:])}
        bits = sum(self._bits.get(axis, 0) for axis in old | new)
        group = prod(self._parts[axis] for axis in {*space.used(number), *space.used(goal)})
        # As if ranks that share axes had just what they want, where it takes long to count.
        mean = whole // group
        if old & new and (group <= SMALL or space.rules.kind is Kind.PACKED):
            rows = self._costs[i].sent(have, want)
            mean = whole // wanted - rows.total * self._ranks // group
        return Overlap(mean, most, bits)

    def hoped(self, node: Node) -> int:
        """In how many steps about the rest can be done: half of what has to be undone or made."""
        found = bool(node[-1])
        for i, number in enumerate(node[:-1]):
            known = self._hopes[i].get(number)
            if known is None:
                sides = self._dims[i].cuts(number), self._dims[i].cuts(self._goal[i])
                known = self._hopes[i][number] = _runs_apart(*sides)
            found += known
        return (found + 1) // 2

    def _steps(self, node: Node) -> int:
        """The steps that are still to come at least.

        Axes that belong on other dims leave theirs in one step a dim at least, and come to the
        others so; a step changes two dims at most.
        """
        leaving = coming = differ = 0
        for i, number in enumerate(node[:-1]):
            if number != self._goal[i]:
                differ += 1
                mask, goal = self._dims[i].mask(number), self._goal_masks[i]
                leaving += bool(mask & ~goal)
                coming += bool(goal & ~mask)
        return max((differ + 1) // 2, leaving, coming, bool(node[-1]))


def _runs_apart(have: Cuts, want: Cuts) -> int:
    """How many sequences, and cuts with an order, come behind what both begin with."""
    same = begin_alike(have, want)
    return sum(
        bool(cut.order) or not i or bool(cuts[i - 1].order) or cuts[i - 1].part != cut.part
        for cuts in (have[same:], want[same:])
        for i, cut in enumerate(cuts)
    )
