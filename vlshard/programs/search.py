"""Finds the cheapest program between two states, by A*.

The cheapest program is the one of the least sum of costs; of several the one that sends least in
all, has fewest steps, whose steps come first in the order AllGather, ReduceScatter, AllToAll,
Slice, AllReduce, Exchange, and then by text. ``program_space`` says which programs there are.
"""

import heapq
from typing import NamedTuple

from vlshard.programs.program_space import Node, ProgramSpace, StepKind
from vlshard.programs.states import State
from vlshard.programs.steps import Step


class Found(NamedTuple):
    """A program as far as it is found; the smallest one is preferred.

    Attributes:
      cost: what the rank sends that sends most, with what it has still to send at least.
      total: the same of all ranks together.
      length: number of steps, with those to come at least.
      kinds: which kinds of steps.
      texts: the steps as text.
      nodes: the states that it leads through.
      sent: the cost, without what is to come.
      sent_by_all: the total, without what is to come.
      guess: what its last step, an exchange not counted yet, costs at least; else None.
    """

    cost: int
    total: int
    length: int
    kinds: tuple[StepKind, ...]
    texts: tuple[str, ...]
    nodes: tuple[Node, ...]
    sent: int
    sent_by_all: int
    guess: int | None


Rank = tuple[int, int, int]


def cheapest(space: ProgramSpace) -> tuple[tuple[Step, ...], tuple[State, ...]]:
    """The cheapest program.

    Exchanges are counted by index only once nothing cheaper is left, since most never are.

    Args:
      space: where to look.
    Returns: the steps, and the states between them.
    """
    heap = [Found(0, 0, 0, (), (), (space.start,), 0, 0, None)]
    best: dict[Node, Rank] = {}
    done: set[Node] = set()
    while True:
        found = heapq.heappop(heap)
        node = found.nodes[-1]
        if node in done:
            continue
        if found.guess is not None:
            counted = _counted(found, found.guess, space)
            if counted[:3] <= best.get(node, counted[:3]):
                best[node] = counted[:3]
                heapq.heappush(heap, counted)
        elif node == space.goal:
            steps = tuple(space.step(text) for text in found.texts)
            return steps, tuple(space.state(between) for between in found.nodes[1:-1])
        else:
            done.add(node)
            _follow(found, space, heap, best)


def _follow(found: Found, space: ProgramSpace, heap: list[Found], best: dict[Node, Rank]) -> None:
    """Keep each program with one step more, if none better to its state or to the goal is known."""
    length, limit = len(found.kinds) + 1, best.get(space.goal)
    for change in space.changes(found.nodes[-1]):
        rest, steps = space.rest(change.after)
        sent, by_all = found.sent + change.cost, found.sent_by_all + change.cost * space.ranks
        rank = (sent + rest, by_all + rest * space.ranks, length + steps)
        if rank > best.get(change.after, rank) or (limit and rank > limit):
            continue
        exchange = change.kind is StepKind.EXCHANGE
        if not exchange:
            best[change.after] = rank
        kinds = (*found.kinds, change.kind)
        texts = (*found.texts, space.text(change, found.nodes[-1]))
        nodes = (*found.nodes, change.after)
        guess = change.cost if exchange else None
        heapq.heappush(heap, Found(*rank, kinds, texts, nodes, sent, by_all, guess))


def _counted(found: Found, guess: int, space: ProgramSpace) -> Found:
    """A program whose last step is an exchange, with what that costs indeed."""
    cost = space.counted(*found.nodes[-2:])
    more, more_by_all = cost.most - guess, cost.total - guess * space.ranks
    return found._replace(
        cost=found.cost + more,
        total=found.total + more_by_all,
        sent=found.sent + more,
        sent_by_all=found.sent_by_all + more_by_all,
        guess=None,
    )
