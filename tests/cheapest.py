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

import numpy as np

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


class DimRules(NamedTuple):
    """What decides which cuts a dim may have, and what its exchanges cost.

    ``homes`` says over how many ranks a side brings rows home, ``limits`` over how many each side
    cuts each factor; ``sides`` are the cuts of both, of packs only.
    """

    kind: str
    label: str
    orders: tuple
    homes: tuple
    limits: tuple
    sides: tuple
    size: Size


class Rules:
    """What may be between two specs, and what it costs."""

    def __init__(self, mesh, play, dims):
        self.mesh, self.play, self.dims = dict(mesh), play, dims
        self.labels = [dim.label for dim in dims]
        self.rows = [total(dim.kind, dim.size) for dim in dims]
        self.unit = self.span(play) ** 2 * lcm(*self.rows)
        self.known, self.known_steps, self.last = {}, {}, None

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
        kind, _, orders, homes, limits, sides, _ = self.dims[i]
        if kind == "pack":
            found = {s[: len(cuts) + 1] for s in sides if s[: len(cuts)] == cuts != s}
            yield from ((s[-1].axes, s) for s in sorted(found, key=str) if {*s[-1].axes} == {*axes})
            return
        for order in permutations(axes):
            yield order, self.sorted(i, (*cuts, *(Cut(OUTER[kind], (a,)) for a in order)))
            for slot, numbers in zip(INNER[kind], limits, strict=True):
                own = [cut for cut in cuts if cut.slot == slot]
                ranks = prod(self.span(cut.axes) for cut in own) * self.span(order)
                if any(n % ranks == 0 for n in numbers) and all(c.slot != "all" for c in cuts):
                    more = (*cuts, *(Cut(slot, (a,)) for a in order))
                    yield order, self.sorted(i, more)
            for name in orders:
                fits = any(n % self.span(order) == 0 for n in homes)
                once = all(cut.order != "home" for cut in cuts)
                if name != "home" or (fits and once):
                    yield order, (*cuts, Cut(OUTER[kind], order, name))

    def sorted(self, i, cuts):
        slots = (*INNER[self.dims[i].kind], OUTER[self.dims[i].kind])
        return tuple(sorted(cuts, key=lambda cut: slots.index(cut.slot)))

    def less(self, i, cuts):
        """The last cuts that may be undone: their axes and what is left."""
        if self.dims[i].kind == "pack":
            yield from [(cuts[-1].axes, cuts[:-1])] if cuts else []
            return
        for slot in (*INNER[self.dims[i].kind], OUTER[self.dims[i].kind]):
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
        if self.dims[i].kind == "pack" or cuts == more:
            return cuts == more
        for slot in (*INNER[self.dims[i].kind], OUTER[self.dims[i].kind]):
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

    def all_steps(self, state):
        """All steps from a state, found once."""
        if state not in self.known_steps:
            self.known_steps[state] = [*self.steps(state)]
        return self.known_steps[state]

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
            # From no cuts at all there are slices.
            left = tuple(a for a in self.play if a in own or a in free)
            for after in self.all_cuts(i, left) if cuts else ():
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
        kind, size = self.dims[i].kind, self.dims[i].size
        most, all_rows, ranks = rows_sent(kind, size, before, after, mesh)
        row = share * prod(self.span(cut.axes) for cut in before) // self.rows[i]
        return most * row, all_rows * row // ranks, axes


def between(src, dst, mesh, sizes):
    """What decides what may be between two specs: the axes, and the rules of the dims."""
    big = {axis for axis, n in mesh.items() if n > 1}
    named = (oracle.axes_of(src) | oracle.axes_of(dst)) & big - {*dst.pending}
    dims = []
    for a, b, size in zip(src.dims, dst.dims, sizes, strict=True):
        sides, kind = (apart(a), apart(b)), a.kind
        if kind != "pack" or not sum(size.lengths):
            size = symbolic(kind, sides, mesh)
        cuts = [cut for side in sides for cut in side]
        homes = {oracle.ranks_along(cut.axes, mesh) for cut in cuts if cut.order == "home"}
        limits = tuple(tuple(dealt(side, slot, mesh) for side in sides) for slot in INNER[kind])
        orders = tuple(sorted({cut.order for cut in cuts if cut.order}))
        if kind == "pack":
            homes, limits, orders = (), (), ()
        sides = sides if kind == "pack" else ()
        label = oracle.label_of(a)
        dims.append(DimRules(kind, label, orders, tuple(sorted(homes)), limits, sides, size))
    return tuple(axis for axis in mesh if axis in named), tuple(dims)


@lru_cache(maxsize=4)
def rules_of(mesh, play, dims):
    """The rules, and what is known by them; the last few are kept."""
    return Rules(mesh, play, dims)


def dealt(cuts, slot, mesh):
    """By how many ranks cuts deal a factor."""
    return prod(oracle.ranks_along(cut.axes, mesh) for cut in cuts if cut.slot == slot)


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
    axes = tuple(a for a, _ in mesh if any(a in cut.axes for cut in before + after))
    have, want = (held(kind, size, cuts, mesh, axes) for cuts in (before, after))
    lowest = have.argmax(axis=0)
    sent = np.bincount(lowest, (want & ~have).sum(axis=0), minlength=len(have))
    return int(sent.max()), int(sent.sum()), len(have)


@lru_cache(maxsize=4_000)
def held(kind, size, cuts, mesh, axes):
    """Whether each place along some axes, the last the fastest, has each row."""
    sizes, rows = dict(mesh), total(kind, size)
    found = []
    for numbers in product(*(range(sizes[axis]) for axis in axes)):
        place = dict(zip(axes, numbers, strict=True))
        found.append(np.zeros(rows, bool))
        found[-1][oracle.ROWS[kind](oracle.Dim(kind, "", cuts), size, sizes, place)] = True
    return np.array(found)


class Search:
    """What the cheapest programs from one state are, found as far as is asked for."""

    def __init__(self, rules, start):
        self.rules, self.done, self.number = rules, {}, 0
        self.heap = [(0, 0, 0, (), (), 0, start)]

    def to(self, goal):
        """Cost, mean, length, kinds and texts of the cheapest program, and states looked at."""
        while goal not in self.done:
            label, state = self.heap[0][:5], heapq.heappop(self.heap)[6]
            if state not in self.done:
                self.done[state] = label
                self.follow(label, state)
        return self.done[goal], len(self.done)

    def follow(self, label, state):
        cost, mean, length, kinds, texts = label
        for more, more_mean, kind, text, dims, pending in self.rules.all_steps(state):
            after = State(dims, pending)
            if after not in self.done:
                self.number += 1
                sums = (cost + more, mean + more_mean, length + 1)
                words = ((*kinds, kind), (*texts, text))
                heapq.heappush(self.heap, (*sums, *words, self.number, after))


def cheapest(src, dst, mesh, sizes):
    """The program that sends least, and is preferred among those that send as little."""
    rules = rules_of(tuple(mesh.items()), *between(src, dst, mesh, sizes))
    start, goal = rules.state(src, dst), rules.state(dst, dst)
    if not rules.last or rules.last[0] != start:
        rules.last = start, Search(rules, start)
    (cost, mean, _, _, texts), states = rules.last[1].to(goal)
    return Cheapest(cost, mean, rules.unit, tuple(text[0] for text in texts), states)
