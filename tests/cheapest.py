"""The cheapest program between two specs, by exhaustive search.

Written apart from the package, on the oracle's specs: every state and every step that the rules
allow is looked at, with no bound, no axis that stays, and no dim taken for another. Costs are
integers in units of a fraction of the tensor that makes all of them whole.
"""

import heapq
from functools import lru_cache
from itertools import permutations, product
from math import lcm, prod
from typing import NamedTuple

from tests import oracle
from tests.oracle import Cut, Size

KINDS = ("AllGather", "ReduceScatter", "AllToAll", "Slice", "AllReduce", "Exchange")


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
        self.sizes = [
            size if kind == "pack" and sum(size.lengths) else symbolic(kind, side, mesh)
            for kind, side, size in zip(self.kinds, self.sides, sizes, strict=True)
        ]
        rows = [total(kind, size) for kind, size in zip(self.kinds, self.sizes, strict=True)]
        self.unit = self.ranks**2 * lcm(*rows)
        self.known = {}

    def state(self, spec, dst):
        pending = frozenset(self.play) & {*spec.pending} - {*dst.pending}
        return State(tuple(dim.cuts for dim in spec.dims), pending)

    def span(self, axes):
        return prod(self.mesh[axis] for axis in axes)

    def share(self, dims):
        return self.unit // prod(self.span(cut.axes) for cuts in dims for cut in cuts)

    def text(self, axes):
        return oracle.joined(axes)

    # ------------------------------------------------------------ cuts of one dim

    def one_more(self, i, cuts, free):
        """The last cuts that a dim may get over free axes: the cut and all cuts with it."""
        key = (i, cuts, free)
        if key not in self.known:
            self.known[key] = [*dict.fromkeys(self._one_more(i, cuts, free))]
        return self.known[key]

    def _one_more(self, i, cuts, free):
        sides = self.sides[i]
        if self.kinds[i] == "pack":
            for side in sides:
                n = len(cuts)
                if side[:n] == cuts and len(side) > n and {*side[n].axes} <= {*free}:
                    yield side[n], side[: n + 1]
            return
        for n in range(1, len(free) + 1):
            for axes in permutations(free, n):
                cut = Cut("" if self.kinds[i] == "plain" else "all", axes)
                yield cut, (*cuts, cut)
        for cut in (cut for side in sides for cut in side if cut.order):
            home = sum(c.order == "home" for c in (*cuts, cut)) > 1
            if {*cut.axes} <= {*free} and not home:
                yield cut, (*cuts, cut)
        for side in sides:
            parts = [cut for cut in side if cut.slot in ("h", "d")]
            if any(c.slot == "all" or c not in parts for c in cuts):
                continue
            for new in parts:
                more = [cut for cut in parts if cut in cuts or cut == new]
                last = [cut for cut in more if cut.slot == new.slot][-1] == new
                if new not in cuts and {*new.axes} <= {*free} and last:
                    yield new, tuple(more)

    def one_less(self, i, cuts):
        """The cuts that may be undone: each with what is left."""
        for k, cut in enumerate(cuts):
            later = cuts[k + 1 :]
            if self.kinds[i] == "fused":
                last = all(c.slot not in (cut.slot, "all") for c in later)
            else:
                last = not later
            if last:
                yield cut, (*cuts[:k], *later)

    def all_cuts(self, i, free):
        """All that a dim may have over some axes."""
        key = (i, free)
        if key not in self.known:
            found, new = {()}, [()]
            while new:
                cuts = new.pop()
                used = {axis for cut in cuts for axis in cut.axes}
                left = tuple(axis for axis in free if axis not in used)
                more = {after for _, after in self.one_more(i, cuts, left)} - found
                # A part may get a cut before the whole has one, not after it.
                found |= more
                new += more
            self.known[key] = sorted(found, key=str)
        return self.known[key]

    def exchangeable(self, i, before, after):
        if before == after:
            return False
        if self.kinds[i] == "pack" or any(cut.order for cut in before + after):
            return True
        common = {a for c in before for a in c.axes} & {a for c in after for a in c.axes}
        here, there = (
            [(c.slot, left) for c in cuts if (left := [a for a in c.axes if a in common])]
            for cuts in (before, after)
        )
        if [a for _, axes in here for a in axes] != [a for _, axes in there for a in axes]:
            return True
        begun = {side[:n] for side in self.sides[i] for n in range(len(side) + 1)}
        return here != there and bool({before, after} & begun)

    # ------------------------------------------------------------ steps

    def steps(self, state):
        """All steps: what each costs, its place among the kinds, its text, and where it leads."""
        dims, pending = state
        used = {axis for cuts in dims for cut in cuts for axis in cut.axes} | pending
        free = tuple(axis for axis in self.play if axis not in used)
        share = self.share(dims)
        for i, cuts in enumerate(dims):
            for cut, less in self.one_less(i, cuts):
                n, over = self.span(cut.axes), self.text(cut.axes)
                without = put(dims, i, less)
                even = (n - 1) * share
                yield even, even, 0, f"AllGather {self.labels[i]} over {over}", without, pending
                for j, others in enumerate(dims):
                    for new, more in self.one_more(j, others, cut.axes) if j != i else ():
                        if new.axes == cut.axes:
                            text = f"AllToAll {self.labels[i]} -> {self.labels[j]} over {over}"
                            cost = even // n
                            yield cost, cost, 2, text, put(without, j, more), pending
            for cut, more in self.one_more(i, cuts, free):
                text = f"Slice {self.labels[i]} over {self.text(cut.axes)}"
                yield 0, 0, 3, text, put(dims, i, more), pending
            summed = tuple(axis for axis in self.play if axis in pending)
            for cut, more in self.one_more(i, cuts, summed):
                text = f"ReduceScatter {self.labels[i]} over {self.text(cut.axes)}"
                cost = share - share // self.span(cut.axes)
                yield cost, cost, 1, text, put(dims, i, more), pending - {*cut.axes}
            own = {axis for cut in cuts for axis in cut.axes}
            left = tuple(axis for axis in self.play if axis in own or axis in free)
            for after in self.all_cuts(i, left):
                if self.exchangeable(i, cuts, after):
                    most, mean, axes = self.exchange(i, cuts, after, share)
                    text = f"Exchange {self.labels[i]} over {' '.join(axes)}"
                    yield most, mean, 5, text, put(dims, i, after), pending
        for k in range(1, len(pending) + 1):
            for some in permutations(sorted(pending, key=self.play.index), k):
                if list(some) == sorted(some, key=self.play.index):
                    cost = 2 * (share - share // self.span(some))
                    yield (
                        cost,
                        cost,
                        4,
                        f"AllReduce over {self.text(some)}",
                        dims,
                        pending - {*some},
                    )

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
            return Cheapest(cost, mean, rules.unit, texts, len(done))
        for more, more_mean, kind, text, dims, pending in rules.steps(state):
            after = State(dims, pending)
            if after not in done:
                number += 1
                label = (cost + more, mean + more_mean, length + 1, (*kinds, kind), (*texts, text))
                heapq.heappush(heap, (*label, number, after))
