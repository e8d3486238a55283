"""The cheapest program between two specs, by exhaustive search.

Written apart from the package, on the oracle's specs: every state and every step that the rules
allow is looked at, with no bound, no axis that stays, and no dim taken for another. Contiguous
cuts of more than one axis count as one for each. Costs are integers in units of a fraction of the
tensor that makes all of them whole.
"""

import heapq
from functools import lru_cache
from itertools import permutations, product
from math import lcm, prod
from typing import NamedTuple

from tests import oracle
from tests.oracle import Cut, Size

KINDS = ("AllGather", "ReduceScatter", "AllToAll", "Slice", "AllReduce", "Exchange")
INNER = {"plain": (), "pack": ("img", "s"), "fused": ("h", "d")}
OUTER = {"plain": "", "pack": "all", "fused": "all"}
SIGNS = {"h": "0", "d": "1", "img": "0", "s": "1", "": "", "all": ""}


class State(NamedTuple):
    dims: tuple
    pending: frozenset


class Cheapest(NamedTuple):
    """The fraction of the tensor that the busiest rank sends is ``cost / unit``."""

    cost: int
    total: int
    unit: int
    steps: tuple
    states: int


class Rules:
    """What may be between two specs, and what it costs."""

    def __init__(self, src, dst, mesh, sizes):
        self.mesh, self.kinds = mesh, [dim.kind for dim in src.dims]
        self.labels = [oracle.label_of(dim) for dim in src.dims]
        big = {axis for axis, n in mesh.items() if n > 1}
        named = (oracle.axes_of(src) | oracle.axes_of(dst)) & big - {*dst.pending}
        self.play = tuple(axis for axis in mesh if axis in named)
        self.ranks = self.span(self.play)
        self.start, self.goal = self.state(src, dst), self.state(dst, dst)
        self.sides = [*zip(self.start.dims, self.goal.dims, strict=True)]
        self.orders = [sorted({c.order for side in s for c in side if c.order}) for s in self.sides]
        self.sizes = [
            size if kind == "pack" and sum(size.lengths) else symbolic(kind, side, mesh)
            for kind, side, size in zip(self.kinds, self.sides, sizes, strict=True)
        ]
        rows = [total(kind, size) for kind, size in zip(self.kinds, self.sizes, strict=True)]
        self.unit = self.ranks**2 * lcm(*rows)
        self.known = {}

    def state(self, spec, dst):
        pending = frozenset(self.play) & {*spec.pending} - {*dst.pending}
        return State(tuple(map(apart, spec.dims)), pending)

    def span(self, axes):
        return prod(self.mesh[axis] for axis in axes)

    def share(self, dims):
        return self.unit // prod(self.span(cut.axes) for cuts in dims for cut in cuts)

    # ------------------------------------------------------------ cuts of one dim

    def one_more(self, i, cuts, axes):
        """What a dim may be cut by just these axes besides, in any order of them."""
        key = (i, cuts, axes)
        if key not in self.known:
            self.known[key] = [*self._one_more(i, cuts, axes)]
        return self.known[key]

    def _one_more(self, i, cuts, axes):
        kind = self.kinds[i]
        if kind == "pack":
            found = {s[: len(cuts) + 1] for s in self.sides[i] if s[: len(cuts)] == cuts != s}
            yield from ((s[-1].axes, s) for s in sorted(found, key=str) if {*s[-1].axes} == {*axes})
            return
        for order in permutations(axes):
            yield order, self.sorted(i, (*cuts, *(Cut(OUTER[kind], (a,)) for a in order)))
            for slot in INNER[kind]:
                own = [cut for cut in cuts if cut.slot == slot]
                ranks = prod(self.span(cut.axes) for cut in own) * self.span(order)
                limits = [self.by(side, slot) for side in self.sides[i]]
                if any(n % ranks == 0 for n in limits) and all(c.slot != "all" for c in cuts):
                    more = (*cuts, *(Cut(slot, (a,)) for a in order))
                    yield order, self.sorted(i, more)
            for name in self.orders[i]:
                homes = [c for side in self.sides[i] for c in side if c.order == "home"]
                fits = any(self.span(c.axes) % self.span(order) == 0 for c in homes)
                once = all(cut.order != "home" for cut in cuts)
                if name != "home" or (fits and once):
                    yield order, (*cuts, Cut(OUTER[kind], order, name))

    def by(self, cuts, slot):
        """By how many ranks cuts deal a factor."""
        return prod(self.span(cut.axes) for cut in cuts if cut.slot == slot)

    def sorted(self, i, cuts):
        slots = (*INNER[self.kinds[i]], OUTER[self.kinds[i]])
        return tuple(sorted(cuts, key=lambda cut: slots.index(cut.slot)))

    def less(self, i, cuts):
        """The last cuts that may be undone: their axes and what is left."""
        if self.kinds[i] == "pack":
            yield from [(cuts[-1].axes, cuts[:-1])] if cuts else []
            return
        for slot in (*INNER[self.kinds[i]], OUTER[self.kinds[i]]):
            own = [cut for cut in cuts if cut.slot == slot]
            if not own or (slot in ("h", "d") and any(cut.slot == "all" for cut in cuts)):
                continue
            run = 1
            while not own[-1].order and run < len(own) and not own[-1 - run].order:
                run += 1
            for n in range(1, run + 1):
                gone = own[-n:]
                left = tuple(cut for cut in cuts if cut not in gone)
                yield tuple(axis for cut in gone for axis in cut.axes), left

    def all_cuts(self, i, axes):
        """All that a dim may have over some axes."""
        key = (i, axes)
        if key not in self.known:
            found, new = {()}, [()]
            while new:
                cuts = new.pop()
                used = {axis for cut in cuts for axis in cut.axes}
                left = tuple(axis for axis in axes if axis not in used)
                for some in subsets(left):
                    more = {after for _, after in self.one_more(i, cuts, some)} - found
                    found |= more
                    new += more
            self.known[key] = sorted(found, key=str)
        return self.known[key]

    def goes_on(self, i, cuts, more):
        """Whether slices lead from some cuts to others."""
        if self.kinds[i] == "pack" or cuts == more:
            return cuts == more
        for slot in (*INNER[self.kinds[i]], OUTER[self.kinds[i]]):
            own, longer = ([cut for cut in side if cut.slot == slot] for side in (cuts, more))
            if longer[: len(own)] != own:
                return False
            if longer != own and slot in ("h", "d") and any(c.slot == "all" for c in cuts):
                return False
        return True

    def written(self, cuts):
        """Cuts as text."""
        return "".join(
            f"{SIGNS[c.slot]}@{' '.join(c.axes)}" + (f".{c.order}" if c.order else "") for c in cuts
        )

    # ------------------------------------------------------------ steps

    def steps(self, state):
        """All steps: what each costs, its place among the kinds, its text, and where it leads."""
        dims, pending = state
        used = {axis for cuts in dims for cut in cuts for axis in cut.axes} | pending
        free = tuple(axis for axis in self.play if axis not in used)
        summed = tuple(axis for axis in self.play if axis in pending)
        share = self.share(dims)
        for i, cuts in enumerate(dims):
            label = self.labels[i]
            for axes, left in self.less(i, cuts):
                n, over, without = self.span(axes), oracle.joined(axes), put(dims, i, left)
                even = (n - 1) * share
                text = (f"AllGather {label} over {over}", self.written(left))
                yield even, even, 0, text, without, pending
                for j, others in enumerate(dims):
                    for _, more in self.one_more(j, others, axes) if j != i else ():
                        words = f"AllToAll {label} -> {self.labels[j]} over {over}"
                        text = (words, self.written(left), self.written(more))
                        yield even // n, even // n, 2, text, put(without, j, more), pending
            for some in subsets(free):
                for axes, more in self.one_more(i, cuts, some):
                    text = (f"Slice {label} over {oracle.joined(axes)}", self.written(more))
                    yield 0, 0, 3, text, put(dims, i, more), pending
            for some in subsets(summed):
                cost = share - share // self.span(some)
                for axes, more in self.one_more(i, cuts, some):
                    text = (f"ReduceScatter {label} over {oracle.joined(axes)}", self.written(more))
                    yield cost, cost, 1, text, put(dims, i, more), pending - {*some}
            own = {axis for cut in cuts for axis in cut.axes}
            for after in self.all_cuts(i, tuple(a for a in self.play if a in own or a in free)):
                if not (self.goes_on(i, cuts, after) or self.goes_on(i, after, cuts)):
                    most, mean, axes = self.exchange(i, cuts, after, share)
                    text = (f"Exchange {label} over {' '.join(axes)}", self.written(after))
                    yield most, mean, 5, text, put(dims, i, after), pending
        for some in subsets(summed):
            cost = 2 * (share - share // self.span(some))
            yield cost, cost, 4, (f"AllReduce over {oracle.joined(some)}",), dims, pending - {*some}

    def exchange(self, i, before, after, share):
        """Cost of an exchange by index: most of any rank, mean of all, and its axes."""
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        changed = {axis for cut in before[same:] + after[same:] for axis in cut.axes}
        axes = tuple(axis for axis in self.mesh if axis in changed)
        mesh = tuple(self.mesh.items())
        most, all_rows, ranks = rows_sent(self.kinds[i], self.sizes[i], before, after, mesh)
        rows = total(self.kinds[i], self.sizes[i])
        row = share * prod(self.span(cut.axes) for cut in before) // rows
        return most * row, all_rows * row // ranks, axes


def apart(dim):
    """The cuts of a dim, contiguous ones for each axis; packed dims as they are written."""
    if dim.kind == "pack":
        return dim.cuts
    found = []
    for cut in dim.cuts:
        found += [cut] if cut.order else [Cut(cut.slot, (axis,)) for axis in cut.axes]
    return tuple(found)


def subsets(axes):
    """Some of the axes, in order: all ways but none."""
    return [
        tuple(a for a, take in zip(axes, taken, strict=True) if take)
        for taken in product((0, 1), repeat=len(axes))
        if any(taken)
    ]


def put(dims, i, cuts):
    return (*dims[:i], cuts, *dims[i + 1 :])


def total(kind, size):
    return size.lengths[0] * size.lengths[1] if kind == "fused" else sum(size.lengths)


def symbolic(kind, sides, mesh):
    """Sizes that all cuts divide, for dims that have none; but for packs the same for all pairs."""
    cuts = [cut for side in sides for cut in side]
    ranks, double = prod(mesh.values()), 2 ** sum(n > 1 for n in mesh.values())
    if kind == "fused":
        return Size((ranks, ranks))
    if kind == "plain":
        if not any(cut.order == "home" for cut in cuts):
            return Size((1,) * (ranks * double))
        home = tuple(k % ranks for k in range(ranks * ranks * double))
        return Size((1,) * len(home), 1, home, ranks)
    double = 2 ** sum(cut.order == "zigzag" for cut in cuts)
    homes = lcm(*(oracle.ranks_along(c.axes, mesh) for c in cuts if c.order == "home"))
    segments = prod(mesh[a] for a in {a for c in cuts if c.slot == "img" for a in c.axes})
    length = prod(mesh[a] for a in {a for c in cuts if c.slot != "img" for a in c.axes}) * double
    home = tuple(k % homes for k in range(segments))
    return Size((length,) * segments, 1, home, homes)


@lru_cache(maxsize=200_000)
def rows_sent(kind, size, before, after, mesh):
    """Rows that an exchange sends: most of any rank, of all, and the number of ranks."""
    sizes = dict(mesh)
    axes = [a for a in sizes if any(a in cut.axes for cut in before + after)]
    places = [dict(zip(axes, p, strict=True)) for p in product(*(range(sizes[a]) for a in axes))]
    have = [held(kind, size, before, sizes, place) for place in places]
    want = [held(kind, size, after, sizes, place) for place in places]
    lowest = {}
    for rank, rows in reversed([*enumerate(have)]):
        lowest |= dict.fromkeys(rows, rank)
    sent = [0] * len(places)
    for rank, rows in enumerate(want):
        for row in rows - have[rank]:
            sent[lowest[row]] += 1
    return max(sent), sum(sent), len(places)


def held(kind, size, cuts, mesh, place):
    """Rows that a place has."""
    return {*oracle.ROWS[kind](oracle.Dim(kind, "", cuts), size, mesh, place)}


def cheapest(src, dst, mesh, sizes):
    """The program that sends least, and is preferred among those that send as little."""
    rules = Rules(src, dst, mesh, sizes)
    heap, done = [(0, 0, 0, (), (), 0, rules.start)], set()
    number = 0
    while True:
        cost, mean, length, kinds, texts, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        if state == rules.goal:
            steps = tuple(text[0] for text in texts)
            return Cheapest(cost, mean, rules.unit, steps, len(done))
        for more, more_mean, kind, text, dims, pending in rules.steps(state):
            after = State(dims, pending)
            if after not in done:
                number += 1
                label = (cost + more, mean + more_mean, length + 1, (*kinds, kind), (*texts, text))
                heapq.heappush(heap, (*label, number, after))


def costs_from(rules):
    """What the cheapest programs cost from the first side to every state, at most to ``limit``."""
    heap, found = [(0, 0, rules.start)], {}
    number = 0
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state in found:
            continue
        found[state] = cost
        for more, _, _, _, dims, pending in rules.steps(state):
            after = State(dims, pending)
            if after not in found:
                number += 1
                heapq.heappush(heap, (cost + more, number, after))
    return found
