"""Finds good programs where there are too many to find the cheapest: in haste, within a budget.

Programs are gone on with in the order of what they are hoped to come to: what they have sent, what
is to come at least, and something for each thing that has still to be undone or made. First the
best of each length only, then the best few; then all that may be better than what that gave.
"""

import heapq
from collections.abc import Iterator, Mapping

from vlshard.programs.changes import Change, Node, StepKind
from vlshard.programs.dim_space import Kind
from vlshard.programs.program_space import ProgramSpace
from vlshard.programs.search import Budget, Path
from vlshard.programs.states import Axes, Cut, Cuts, used_axes

# How many programs of each length are gone on with at first.
WIDTH = 12

# What a program is hoped to come to, a number that tells equal ones apart, the program, and whether
# it ends in an exchange that is not counted yet.
Entry = tuple[int, int, Path, bool]


def good_path(space: ProgramSpace, budget: Budget) -> Path:
    """A good program, at worst one of two that need no search.

    Args:
      space: where to look.
      budget: how much may be looked at; the most of it is used up.
    """
    paths = [plain_path(space), *([moved] if (moved := moving_path(space)) else [])]
    best, part = min(paths, key=lambda path: path.sent), budget.steps // 3
    for width, steps in ((1, part), (WIDTH, part)):
        best = _best_few(space, Budget(budget.states, steps), best, width)
    return _any(space, Budget(budget.states, 2 * part), best)


def _best_few(space: ProgramSpace, budget: Budget, best: Path, width: int) -> Path:
    """The best program, if only the most hopeful few of each length are gone on with."""
    level = [Path(None, None, space.start, 0, 0)]
    seen: dict[Node, int] = {}
    while level and budget.left:
        heap = [made for path in level for made in _longer(space, path, budget)]
        heapq.heapify(heap)
        level: list[Path] = []
        while heap and len(level) < width:
            path = _next(space, heap, budget, seen, best)
            if path and path.node == space.goal:
                best = path
            elif path:
                level.append(path)
    return best


def _any(space: ProgramSpace, budget: Budget, best: Path) -> Path:
    """The best program, if all are gone on with that may be better."""
    start = Path(None, None, space.start, 0, 0)
    heap: list[Entry] = [(0, 0, start, False)]
    seen: dict[Node, int] = {}
    while heap and budget.left:
        path = _next(space, heap, budget, seen, best)
        if path and path.node == space.goal:
            best = path
        elif path and path.sent + space.rest(path.node)[0] < best.sent:
            for made in _longer(space, path, budget):
                if made[2].sent + space.rest(made[2].node)[0] < best.sent:
                    heapq.heappush(heap, made)
    return best


def _longer(space: ProgramSpace, path: Path, budget: Budget) -> Iterator[Entry]:
    """A program with one step more, each way; exchanges as if they cost the least."""
    budget.states -= 1
    for change in _all_changes(space, path.node):
        if not budget.left:
            break
        budget.steps -= 1
        made = _with(path, change, change.cost, change.cost * space.ranks)
        exchange = change.kind == StepKind.EXCHANGE
        yield _hope(space, made), budget.steps, made, exchange


def _next(
    space: ProgramSpace, heap: list[Entry], budget: Budget, seen: dict[Node, int], best: Path
) -> Path | None:
    """The most hopeful program, if it comes to its state for less than others."""
    _, number, path, guessed = heapq.heappop(heap)
    if path.sent >= min(best.sent, seen.get(path.node, path.sent + 1)):
        return None
    if guessed and path.before and path.change:
        change, before = path.change, path.before
        budget.steps -= space.price(before.node, change.after, change.dims[0])
        path = _with(before, change, *space.counted(before.node, change.after, change.dims[0]))
        heapq.heappush(heap, (_hope(space, path), number, path, False))
        return None
    seen[path.node] = path.sent
    return path


def _with(path: Path, change: Change, cost: int, by_all: int) -> Path:
    """A path with one step more."""
    change = change._replace(cost=cost)
    return Path(path, change, change.after, path.sent + cost, path.sent_by_all + by_all)


def _hope(space: ProgramSpace, path: Path) -> int:
    """What a path is hoped to come to: each step to come sends the least part that a rank has."""
    steps = space.hoped(path.node)
    return path.sent + space.rest(path.node)[0] + steps * space.unit // space.ranks


def _all_changes(space: ProgramSpace, node: Node) -> Iterator[Change]:
    """All steps from a state, exchanges with what they cost at least."""
    yield from space.changes(node)
    for i in space.exchangeable(node):
        yield from space.exchanges(node, i)


def plain_path(space: ProgramSpace) -> Path:
    """The program that carries out the sums, undoes what is cut otherwise, and cuts anew."""
    path = Path(None, None, space.start, 0, 0)
    if space.start[-1]:
        path = _taken(space, path, StepKind.ALL_REDUCE, (*space.start[:-1], 0))
    for i, dim in enumerate(space.dims):
        goal = [*_starts(dim.cuts(space.goal[i]))]
        while (cuts := dim.cuts(path.node[i])) not in goal:
            left = next(undone.left for undone in dim.undone(path.node[i]))
            after = (*path.node[:i], left, *path.node[i + 1 :])
            path = _taken(space, path, StepKind.ALL_GATHER, after)
    for i, dim in enumerate(space.dims):
        for cuts in _starts(dim.cuts(space.goal[i])):
            if len(cuts) > len(dim.cuts(path.node[i])):
                after = (*path.node[:i], dim.number(cuts), *path.node[i + 1 :])
                path = _taken(space, path, StepKind.SLICE, after)
    return path


def moving_path(space: ProgramSpace) -> Path | None:
    """The program that moves each axis to where it belongs, and then puts each dim in order.

    Before axes leave a dim, an exchange brings them to its end; what belongs nowhere is gathered.

    Returns: the program; None if a dim is packed, which takes no cuts but its own.
    """
    if any(dim.rules.kind is Kind.PACKED for dim in space.dims):
        return None
    goals = [used_axes(dim.cuts(n)) for dim, n in zip(space.dims, space.goal, strict=False)]
    home = {axis: i for i, axes in enumerate(goals) for axis in axes}
    path = Path(None, None, space.start, 0, 0)
    nowhere = sum(bit for axis, bit in space.bits.items() if axis not in home)
    if summed := path.node[-1] & nowhere:
        after = (*path.node[:-1], path.node[-1] & ~summed)
        path = _made(space, path, StepKind.ALL_REDUCE, (), space.named(summed), after)
    for i, axes in enumerate(goals):
        for kind in (StepKind.REDUCE_SCATTER, StepKind.SLICE):
            used = path.node[-1] if kind is StepKind.REDUCE_SCATTER else space.free(path.node)
            some = tuple(axis for axis in axes if space.bits.get(axis, 0) & used)
            if some:
                after = _appended(space, path.node, i, some)
                if kind is StepKind.REDUCE_SCATTER:
                    mask = sum(space.bits[axis] for axis in some)
                    after = (*after[:-1], after[-1] & ~mask)
                path = _made(space, path, kind, (i,), some, after)
    for i in range(len(space.dims)):
        path = _sent_off(space, path, i, home)
    for i, dim in enumerate(space.dims):
        path = _exchanged(space, path, i, dim.cuts(space.goal[i]))
    return path


def _sent_off(space: ProgramSpace, path: Path, i: int, home: Mapping[str, int]) -> Path:
    """A path that goes on with the axes leaving a dim that belong on others, or nowhere."""
    dim = space.dims[i]
    own = used_axes(dim.cuts(path.node[i]))
    groups = {axis: home.get(axis, -1) for axis in own if home.get(axis, -1) != i}
    if not groups:
        return path
    stay = [axis for axis in own if axis not in groups]
    to = sorted(dict.fromkeys(groups.values()))
    runs = [tuple(axis for axis in own if groups.get(axis) == j) for j in to]
    order = [*stay, *(axis for run in runs for axis in run)]
    kept = [cut for cut in dim.cuts(path.node[i]) if not any(a in space.bits for a in cut.axes)]
    moved = [Cut((), (axis,)) for axis in order if axis in space.bits]
    path = _exchanged(space, path, i, (*kept, *moved))
    for j, run in reversed([*zip(to, runs, strict=True)]):
        left = dim.cuts(path.node[i])[: -len(run)]
        less = (*path.node[:i], dim.number(left), *path.node[i + 1 :])
        if j < 0:
            path = _made(space, path, StepKind.ALL_GATHER, (i,), run, less)
        else:
            after = _appended(space, less, j, run)
            path = _made(space, path, StepKind.ALL_TO_ALL, (i, j), run, after)
    return path


def _appended(space: ProgramSpace, node: Node, i: int, axes: Axes) -> Node:
    """A state with a dim cut by more axes in contiguous blocks."""
    cuts = (*space.dims[i].cuts(node[i]), *(Cut((), (axis,)) for axis in axes))
    return (*node[:i], space.dims[i].number(cuts), *node[i + 1 :])


def _exchanged(space: ProgramSpace, path: Path, i: int, cuts: Cuts) -> Path:
    """A path with an exchange more that gives a dim its cuts, if it has others."""
    if space.dims[i].cuts(path.node[i]) == cuts:
        return path
    after = (*path.node[:i], space.dims[i].number(cuts), *path.node[i + 1 :])
    change = Change(StepKind.EXCHANGE, (), (i,), after, 0)
    return _with(path, change, *space.counted(path.node, after, i))


def _made(
    space: ProgramSpace, path: Path, kind: StepKind, dims: tuple[int, ...], axes: Axes, after: Node
) -> Path:
    """A path with one step more over some axes."""
    cost = space.cost(kind, path.node, sum(space.bits[axis] for axis in axes))
    return _with(path, Change(kind, axes, dims, after, 0), cost, cost * space.ranks)


def _starts(cuts: Cuts) -> Iterator[Cuts]:
    """No cuts, the first, the first two, ..."""
    return (cuts[:n] for n in range(len(cuts) + 1))


def _taken(space: ProgramSpace, path: Path, kind: StepKind, after: Node) -> Path:
    """A path with one step more, which leads to a state."""
    change = next(
        change
        for change in space.changes(path.node)
        if change.kind == kind and change.after == after
    )
    return _with(path, change, change.cost, change.cost * space.ranks)
