"""The cheapest way from one state to another, whatever the dims are called, and whether it is that.

With few axes all of ``program_space`` is searched. With many the search is first by its narrow
rules, and then by all if that ends. What ends before its budget, or costs as little as any program
must, is proven to be the cheapest; else the best that was found is taken.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from vlshard.language import MeshShape
from vlshard.programs.changes import StepKind
from vlshard.programs.dim_space import Kind
from vlshard.programs.hasty import good_path
from vlshard.programs.program_space import ProgramSpace
from vlshard.programs.rules import KnownDim
from vlshard.programs.search import Budget, Path, Search
from vlshard.programs.spelling import Spelled, spelled
from vlshard.programs.states import Axes, State, apart, changed_axes

# States that a search may expand, and steps that it may look at.
STATES, STEPS = 4_000, 24_000
# With no more movable axes all is searched at once; with no more, and with no more by a smaller
# budget, after a search by narrow rules.
FEW, FULL, SOME = 2, 3, 5
# Dims and movable axes together up to which the budget is not made smaller.
LIGHT = 8


class Leg(NamedTuple):
    """One step of a way: its kind, axes and dims, the state after it, and if it is a spelling."""

    kind: StepKind
    axes: Axes
    dims: tuple[int, ...]
    after: State
    spelling: bool = False


class Way(NamedTuple):
    """Steps between two states.

    Attributes:
      legs: the steps, in order.
      cost: the fraction of the tensor that they cost, as ``program_space`` counts.
      proven: whether no others cost less.
    """

    legs: tuple[Leg, ...]
    cost: Fraction
    proven: bool


@lru_cache(maxsize=1024)
def way(dims: tuple[KnownDim, ...], src: State, dst: State, mesh: MeshShape) -> Way:
    """The cheapest way that is found.

    Args:
      dims: what is known of the dims.
      src: the state before, as written.
      dst: the state after.
      mesh: the parts of the mesh and their ranks.
    """
    before, after = (_apart(dims, side) for side in (src, dst))
    space, path, proven = _searched(dims, before, after, mesh)
    cost = Fraction(path.sent, space.unit)
    return Way(tuple(_legs(space, path, dims, src, dst)), cost, proven)


def _searched(
    dims: Sequence[KnownDim], src: State, dst: State, mesh: MeshShape
) -> tuple[ProgramSpace, Path, bool]:
    """The best path, in which space, and whether it is proven."""
    space = ProgramSpace(dims, src, dst, mesh, narrow=False)
    least, axes = space.rest(space.start)[0], len(space.axes)
    # Steps take longer to look at where there is more to look at.
    steps = STEPS * LIGHT // max(LIGHT, len(dims) + axes)
    if axes <= FEW:
        found = Search(space, Budget(STATES, 2 * steps)).run()
        if found.path and found.path.sent <= found.least:
            return space, found.path, True
    small = ProgramSpace(dims, src, dst, mesh, narrow=True)
    path = Search(small, Budget(STATES, steps // 2)).run().path
    path = path or good_path(small, Budget(STATES, steps))
    if axes > SOME or (axes > FULL and path.sent <= least):
        return small, path, path.sent <= least
    steps = steps * 4 // 3 if axes <= FULL else steps // 2
    found = Search(space, Budget(STATES, steps), path.sent).run()
    if found.path and (found.path.sent < path.sent or found.path.sent <= found.least):
        return space, found.path, found.path.sent <= found.least
    return small, path, found.least >= path.sent


def _apart(dims: Sequence[KnownDim], state: State) -> State:
    """A state with contiguous cuts apart, but for packed dims, which are as they are written."""
    pairs = zip(dims, state.dims, strict=True)
    return State(
        tuple(cuts if dim.kind is Kind.PACKED else apart(cuts) for dim, cuts in pairs),
        state.pending,
    )


def _legs(
    space: ProgramSpace, path: Path, dims: Sequence[KnownDim], src: State, dst: State
) -> Iterator[Leg]:
    """The steps of a path, with spellings between them."""
    steps = path.steps()
    states = [space.state(space.start), *(space.state(change.after) for _, change in steps)]
    written: list[list[Spelled]] = []
    for i, dim in enumerate(dims):
        cuts = [state.dims[i] for state in states]
        if dim.kind is Kind.PACKED:
            written.append([Spelled(some) for some in cuts])
        else:
            exchanged = [c.kind == StepKind.EXCHANGE and i in c.dims for _, c in steps]
            written.append(spelled(cuts, exchanged, src.dims[i], dst.dims[i]))
    now = src
    for t, state in enumerate(states):
        after = State(tuple(way[t].cuts for way in written), state.pending)
        if t:
            change = steps[t - 1][1]
            axes = change.axes
            if change.kind == StepKind.EXCHANGE:
                axes = changed_axes(
                    now.dims[change.dims[0]], after.dims[change.dims[0]], space.parts
                )
            yield Leg(StepKind(change.kind), axes, change.dims, after)
        now = after
        for i, way in enumerate(written):
            if (cuts := way[t].respelled) is not None:
                after = State((*now.dims[:i], cuts, *now.dims[i + 1 :]), now.pending)
                axes = changed_axes(now.dims[i], cuts, space.parts)
                yield Leg(StepKind.EXCHANGE, axes, (i,), after, spelling=True)
                now = after
