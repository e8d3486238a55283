"""What the cheapest program between two specs costs, by exhaustive search in numbers.

The same rules as in ``tests.cheapest``, for more axes: cuts of a dim are numbered, what leads from
one to another is found once for all pairs, and programs that cost more than a limit are left out.
Nothing else is: there is no bound of what is to come.
"""

import heapq
from functools import lru_cache
from itertools import product
from math import prod

from tests.cheapest import Rules, apart, between


class Tables:
    """The cuts of one dim as numbers, axes as bits, and what leads from one to another."""

    def __init__(self, mesh, dim):
        self.sizes = dict(mesh)
        self.rules = Rules(mesh, tuple(self.sizes), (dim,))
        self.bits = {axis: 1 << i for i, axis in enumerate(self.sizes)}
        self.cuts, self.masks, self.numbers, self.found = [], [], {}, {}

    def number(self, cuts):
        if cuts not in self.numbers:
            self.numbers[cuts] = len(self.cuts)
            self.cuts.append(cuts)
            self.masks.append(sum(self.bits[axis] for cut in cuts for axis in cut.axes))
        return self.numbers[cuts]

    def axes(self, mask):
        return tuple(axis for axis, bit in self.bits.items() if bit & mask)

    def less(self, number):
        """The axes of last cuts that may be undone, and what is left."""
        key = number
        if key not in self.found:
            self.found[key] = [
                (sum(self.bits[axis] for axis in axes), self.number(left))
                for axes, left in self.rules.less(0, self.cuts[number])
            ]
        return self.found[key]

    def more(self, number, mask):
        """What the dim may be cut by just these axes besides."""
        key = number, mask
        if key not in self.found:
            made = self.rules.one_more(0, self.cuts[number], self.axes(mask))
            self.found[key] = [*dict.fromkeys(self.number(cuts) for _, cuts in made)]
        return self.found[key]

    def exchanges(self, number, mask):
        """What exchanges lead to over some axes: the part of the dim that is sent, and to what."""
        key = "exchange", number, mask
        if key not in self.found:
            before, rules, found = self.cuts[number], self.rules, []
            for after in rules.all_cuts(0, self.axes(mask)) if before else ():
                if not (rules.goes_on(0, before, after) or rules.goes_on(0, after, before)):
                    key_of_cost = "cost", before, after
                    if key_of_cost not in self.found:
                        share = rules.share((before,))
                        self.found[key_of_cost] = rules.exchange(0, before, after, share)[0]
                    found.append((self.found[key_of_cost], self.number(after)))
            self.found[key] = sorted(found)
        return self.found[key]


@lru_cache(maxsize=64)
def tables_of(mesh, dim):
    return Tables(mesh, dim)


class Costs:
    """What lies between two specs, in numbers."""

    def __init__(self, src, dst, mesh, sizes):
        play, dims = between(src, dst, mesh, sizes)
        sizes = tuple(mesh.items())
        self.tables = [tables_of(sizes, dim._replace(label="")) for dim in dims]
        bits = {axis: 1 << i for i, axis in enumerate(mesh)}
        self.spans = [
            prod(n for n, take in zip(mesh.values(), taken[::-1], strict=True) if take)
            for taken in product((0, 1), repeat=len(mesh))
        ]
        self.play = sum(bits[axis] for axis in play)
        # A whole tensor counts so much, in which all costs of all dims are whole.
        self.unit = prod(table.rules.unit for table in self.tables) * self.spans[-1] ** 2
        summed = {*play} & {*src.pending} - {*dst.pending}
        self.start, self.goal = (
            (*(t.number(apart(d)) for t, d in zip(self.tables, side.dims, strict=True)), pending)
            for side, pending in ((src, sum(bits[a] for a in summed)), (dst, 0))
        )

    def cheapest(self, limit):
        """What the cheapest program costs, if that is no more than a limit; else None."""
        heap, done, best = [(0, self.start)], set(), {self.start: 0}
        while heap:
            cost, state = heapq.heappop(heap)
            if state == self.goal:
                return cost
            if state in done:
                continue
            done.add(state)
            for more, after in self.steps(state, limit - cost):
                if cost + more < best.get(after, limit + 1):
                    best[after] = cost + more
                    heapq.heappush(heap, (cost + more, after))
        return None

    def steps(self, state, limit):
        """What each step costs, up to a limit, and where it leads."""
        *numbers, pending = state
        masks = [table.masks[n] for table, n in zip(self.tables, numbers, strict=True)]
        used = sum(masks)
        free, share = self.play & ~used & ~pending, self.unit // self.spans[used]
        for i, (table, number) in enumerate(zip(self.tables, numbers, strict=True)):
            for mask, left in table.less(number):
                n, without = self.spans[mask], put(state, i, left)
                if (n - 1) * share <= limit:
                    yield (n - 1) * share, without
                once = share - share // n
                for j, other in enumerate(self.tables) if once <= limit else ():
                    if i != j:
                        yield from ((once, put(without, j, k)) for k in other.more(state[j], mask))
            for some in subsets(free):
                yield from ((0, put(state, i, k)) for k in table.more(number, some))
            for some in subsets(pending):
                once = share - share // self.spans[some]
                for k in table.more(number, some) if once <= limit else ():
                    yield once, (*put(state, i, k)[:-1], pending & ~some)
            scale = self.unit * self.spans[masks[i]] // (self.spans[used] * table.rules.unit)
            for sent, k in table.exchanges(number, masks[i] | free):
                if sent * scale > limit:
                    break
                yield sent * scale, put(state, i, k)
        for some in subsets(pending):
            cost = 2 * (share - share // self.spans[some])
            if cost <= limit:
                yield cost, (*numbers, pending & ~some)


def subsets(mask):
    """The sets of some axes, as bits, but none."""
    some = mask
    while some:
        yield some
        some = (some - 1) & mask


def put(state, i, number):
    return (*state[:i], number, *state[i + 1 :])
