"""Finds the cheapest program between two states, by A* with a fixed bound on what it looks at.

The cheapest program is the one of the least sum of costs; of several the one that sends least in
all, has fewest steps, whose steps come first in the order AllGather, ReduceScatter, AllToAll,
Slice, AllReduce, Exchange, and then by text. ``program_space`` says which programs there are.

What is looked at is counted, never timed, so equal arguments give equal programs everywhere.
"""

import heapq
from typing import NamedTuple

from vlshard.programs.changes import Change, Node, StepKind
from vlshard.programs.program_space import ProgramSpace

Rank = tuple[int, int, int]


class Budget:
    """How many states may still be expanded, and how many steps looked at."""

    def __init__(self, states: int, steps: int) -> None:
        self.states, self.steps = states, steps

    @property
    def left(self) -> bool:
        """Whether any more may be looked at."""
        return self.states > 0 and self.steps > 0


class Path(NamedTuple):
    """How a state is come to: the path before, its last step, and what all steps cost."""

    before: "Path | None"
    change: Change | None
    node: Node
    sent: int
    sent_by_all: int

    def steps(self) -> list[tuple[Node, Change]]:
        """The steps in order, each with the state before it."""
        found: list[tuple[Node, Change]] = []
        path = self
        while path.before and path.change:
            found.append((path.before.node, path.change))
            path = path.before
        return found[::-1]


class Found(NamedTuple):
    """The best program found.

    Attributes:
      path: its steps; None if none is found.
      least: no program of the space costs less.
    """

    path: Path | None
    least: int


# A program as far as it is found: its rank with what is to come at least, kinds and texts of its
# steps, a number that tells equal ones apart, the path, and the dim that an exchange may change
# next (-1: none), or -2 for an exchange that is not counted yet.
Entry = tuple[int, int, int, tuple[int, ...], tuple[tuple[str, ...], ...], int, Path, int]


class Search:
    """One search by A*."""

    def __init__(self, space: ProgramSpace, budget: Budget, limit: int | None = None) -> None:
        """Prepare.

        Args:
          space: where to look.
          budget: how much may be looked at; it is used up.
          limit: what a program is known to cost; those that cost more are not looked for.
        """
        self._space, self._budget, self._limit = space, budget, limit
        self._heap: list[Entry] = []
        self._best: dict[Node, Rank] = {}
        self._goal: Entry | None = None
        self._number = 0

    def run(self) -> Found:
        """Find the cheapest program, or the best until the budget ends.

        Exchanges are looked at, and counted by index, only once nothing cheaper is left.
        """
        space, heap, best = self._space, self._heap, self._best
        start = Path(None, None, space.start, 0, 0)
        cost, steps = space.rest(space.start)
        done: dict[Node, Rank] = {}
        heap.append((cost, cost * space.ranks, steps, (), (), 0, start, -1))
        while heap:
            entry = heapq.heappop(heap)
            path, dim = entry[6], entry[7]
            node = path.node
            if dim >= 0:
                self._exchange(entry)
            elif dim == -2:
                self._count(entry)
            elif node == space.goal:
                return Found(path, entry[0])
            elif (rank := (path.sent, path.sent_by_all, len(entry[3]))) <= best.get(
                node, rank
            ) and (node not in done or rank < done[node]):
                if not self._budget.left:
                    return Found(self._goal[6] if self._goal else None, entry[0])
                done[node] = rank
                self._follow(entry)
        return Found(None, self._limit or 0)

    def _follow(self, entry: Entry) -> None:
        """Keep each program with one step more, if none better to its state is known."""
        space, budget = self._space, self._budget
        path, length, node = entry[6], len(entry[3]) + 1, entry[6].node
        budget.states -= 1
        for change in space.changes(node):
            if not budget.left:
                break
            budget.steps -= 1
            sent, by_all = path.sent + change.cost, path.sent_by_all + change.cost * space.ranks
            self._push(entry, change, sent, by_all, length, -1)
        # No exchange of a dim leads to less than what is to come at least.
        kinds = (*entry[3], int(StepKind.EXCHANGE))
        for i in space.exchangeable(node):
            self._number += 1
            rest = (entry[0], entry[1], max(entry[2], length))
            heapq.heappush(self._heap, (*rest, kinds, entry[4], self._number, path, i))

    def _push(
        self, entry: Entry, change: Change, sent: int, by_all: int, length: int, mark: int
    ) -> None:
        """Keep a program, if none better to its state and none cheaper to the goal is known."""
        space, best, after = self._space, self._best, change.after
        rest, steps = space.rest(after)
        cost = max(sent + rest, entry[0])
        if self._limit is not None and cost > self._limit:
            return
        rank = (cost, max(by_all + rest * space.ranks, entry[1]), length + steps)
        known = best.get(after)
        if (known and (sent, by_all, length) > known) or (self._goal and rank > self._goal[:3]):
            return
        kinds, texts = (*entry[3], change.kind), (*entry[4], space.text(entry[6].node, change))
        self._number += 1
        path = Path(entry[6], change, after, sent, by_all)
        made = (*rank, kinds, texts, self._number, path, mark)
        if mark == -1:
            best[after] = (sent, by_all, length)
            if after == space.goal and (not self._goal or made < self._goal):
                self._goal = made
        heapq.heappush(self._heap, made)

    def _exchange(self, entry: Entry) -> None:
        """Look at the exchanges of a dim; those that are counted already need no guess."""
        space, path, length = self._space, entry[6], len(entry[3])
        before = (*entry[:3], entry[3][:-1], *entry[4:])
        for change in space.exchanges(path.node, entry[7]):
            self._budget.steps -= 1
            if space.price(path.node, change.after, entry[7]):
                sent = path.sent + change.cost
                by_all = path.sent_by_all + change.cost * space.ranks
                self._push(before, change, sent, by_all, length, -2)
            else:
                self._push_counted(before, change, length)

    def _count(self, entry: Entry) -> None:
        """Keep a program whose last step is an exchange, with what that costs indeed."""
        path, space = entry[6], self._space
        if not path.before or not path.change:
            raise AssertionError("a program that ends in an exchange has a step")
        before, change = path.before, path.change
        self._budget.steps -= space.price(before.node, change.after, change.dims[0])
        shorter = (*entry[:3], entry[3][:-1], entry[4][:-1], 0, before, -1)
        self._push_counted(shorter, change, len(entry[3]))

    def _push_counted(self, entry: Entry, change: Change, length: int) -> None:
        """Keep a program with an exchange more."""
        path = entry[6]
        cost = self._space.counted(path.node, change.after, change.dims[0])
        sent, by_all = path.sent + cost.most, path.sent_by_all + cost.total
        self._push(entry, change._replace(cost=cost.most), sent, by_all, length, -1)
