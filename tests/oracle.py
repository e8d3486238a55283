"""Brute force: which specs there are, who holds which rows, and what a program must give.

Plain index arithmetic over Python lists, written apart from the package. A dim is its kind and its
cuts in the order in which they apply; the axes of a cut are joined, major to minor. All data are
integers in fp64, so that every sum is exact.
"""

import re
from functools import lru_cache
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

SLOTS = {"plain": ("",), "pack": ("img", "s", "all"), "fused": ("h", "d", "all")}
ORDERS = {
    "": (None, "zigzag", "home"),
    "img": (None, "home", "balance"),
    "s": (None, "zigzag"),
    "all": (None,),
    "h": (None,),
    "d": (None,),
}
NAMES = {"pack": ("img", "s"), "fused": ("h", "d")}


class Cut(NamedTuple):
    slot: str
    axes: tuple[str, ...]
    order: str | None = None


class Dim(NamedTuple):
    kind: str
    name: str
    cuts: tuple[Cut, ...] = ()


class Spec(NamedTuple):
    dims: tuple[Dim, ...]
    pending: tuple[str, ...] = ()


class Size(NamedTuple):
    """A plain dim has ``lengths`` of 1; a fused one has two lengths, heads and width.

    ``home`` says for each segment (or row) which of ``homes`` ranks it is at home with.
    """

    lengths: tuple[int, ...]
    unit: int = 1
    home: tuple[int, ...] = ()
    homes: int = 1


class Case(NamedTuple):
    src: Spec
    dst: Spec
    sizes: tuple[Size, ...]
    seed: int


# ---------------------------------------------------------------- specs as text


def joined(axes):
    return axes[0] if len(axes) == 1 else f"({' '.join(axes)})"


def text_of(spec):
    """The spec in the language."""
    dims = []
    for kind, name, cuts in spec.dims:
        marks = dict.fromkeys(SLOTS[kind], "")
        for slot, axes, order in cuts:
            marks[slot] += f"@{joined(axes)}" + (f".{order}" if order else "")
        if kind == "plain":
            dims.append(name + marks[""])
        else:
            first, second = NAMES[kind]
            dims.append(f"({first}{marks[first]} {second}{marks[second]}){marks['all']}")
    return " ".join(dims + (["+", *spec.pending] if spec.pending else []))


def read(text):
    """The spec of a text, of the dims that ``text_of`` writes."""
    left, _, pending = text.partition("+")
    cut = r"@(?:\w+|\([\w ]+\))(?:\.\w+)?"
    dims = []
    for word in re.findall(rf"(?:\w+|\([^()]*(?:\([\w ]+\)[^()]*)*\))(?:{cut})*", left):
        bracket = re.fullmatch(rf"\((\w+)((?:{cut})*) (\w+)((?:{cut})*)\)((?:{cut})*)", word)
        if bracket:
            first, one, second, two, outer = bracket.groups()
            kind = "pack" if first == "img" else "fused"
            marks = {first: one, second: two, "all": outer}
            name = ""
        else:
            name = re.match(r"\w+", word).group()
            kind, marks = "plain", {"": word[len(name) :]}
        cuts = []
        for slot, mark in marks.items():
            for axes, order in re.findall(r"@(\w+|\([\w ]+\))(?:\.(\w+))?", mark):
                cuts.append(Cut(slot, tuple(axes.strip("()").split()), order or None))
        dims.append(Dim(kind, name, tuple(cuts)))
    return Spec(tuple(dims), tuple(pending.split()))


def arrow_of(case):
    return f"{text_of(case.src)} -> {text_of(case.dst)}"


def label_of(dim):
    return {"plain": dim.name, "pack": "(img s)", "fused": "(h d)"}[dim.kind]


# ---------------------------------------------------------------- which specs there are


def groupings(axes):
    """All ways to cut a sequence of axes into runs that are joined."""
    if not axes:
        return [()]
    return [(axes[:n], *rest) for n in range(1, len(axes) + 1) for rest in groupings(axes[n:])]


def cuts_of(kind, axes):
    """All ways to cut a dim over exactly these axes."""
    found = []
    for order in permutations(axes):
        for groups in groupings(order):
            for slots in product(SLOTS[kind], repeat=len(groups)):
                if list(slots) != sorted(slots, key=SLOTS[kind].index):
                    continue
                for orders in product(*(ORDERS[slot] for slot in slots)):
                    if orders.count("home") < 2:
                        found.append(tuple(map(Cut, slots, groups, orders)))
    return found


def specs_of(kinds, axes):
    """All specs of dims of these kinds over any of the axes, sums pending or not."""
    found = []
    places = [*range(len(kinds)), "whole", "pending"]
    for where in product(places, repeat=len(axes)):
        of = {p: tuple(a for a, w in zip(axes, where, strict=True) if w == p) for p in places}
        for cuts in product(*(cuts_of(kind, of[i]) for i, kind in enumerate(kinds))):
            dims = tuple(
                Dim(k, "abc"[i] if k == "plain" else "", c)
                for i, (k, c) in enumerate(zip(kinds, cuts, strict=True))
            )
            found.append(Spec(dims, of["pending"]))
    return found


# ---------------------------------------------------------------- who holds what


def place_of(mesh, rank):
    """Coordinates of a rank; the last axis is the fastest."""
    place = {}
    for axis in reversed(list(mesh)):
        place[axis] = rank % mesh[axis]
        rank //= mesh[axis]
    return place


def count(mesh):
    return int(np.prod(list(mesh.values())))


def ranks_along(axes, mesh):
    return int(np.prod([mesh[axis] for axis in axes]))


def place_along(axes, mesh, place):
    at = 0
    for axis in axes:
        at = at * mesh[axis] + place[axis]
    return at


def parts(items, n):
    """Runs whose lengths differ by one at most, longer ones first."""
    base, extra = divmod(len(items), n)
    ends = [0]
    for i in range(n):
        ends.append(ends[-1] + base + (1 if i < extra else 0))
    return [items[ends[i] : ends[i + 1]] for i in range(n)]


def torch_chunk(items, n, r):
    block = -(-len(items) // n)
    return items[r * block : (r + 1) * block]


def at_home(size, i, n):
    """Which of n ranks has a segment at home, where n are the leading ones of all."""
    return size.home[i] // (size.homes // n)


def rows_of_plain(dim, size, mesh, place):
    held = list(range(len(size.lengths)))
    for _, axes, order in dim.cuts:
        n, r = ranks_along(axes, mesh), place_along(axes, mesh, place)
        if order == "home":
            held = [row for row in held if at_home(size, row, n) == r]
        elif order == "zigzag":
            chunks = parts(held, 2 * n)
            held = chunks[r] + chunks[2 * n - 1 - r]
        else:
            held = torch_chunk(held, n, r)
    return held


def rows_of_pack(dim, size, mesh, place):
    segments, start = [], 0
    for i, length in enumerate(size.lengths):
        rows = list(range(start, start + length))
        segments.append((i, [rows[j : j + size.unit] for j in range(0, length, size.unit)]))
        start += length
    for slot, axes, order in dim.cuts:
        n, r = ranks_along(axes, mesh), place_along(axes, mesh, place)
        if slot == "img" and order == "home":
            segments = [segment for segment in segments if at_home(size, segment[0], n) == r]
        elif slot == "img" and order == "balance":
            segments = balanced(segments, n, r)
        elif slot == "img":
            segments = parts(segments, n)[r]
        elif slot == "s" and order == "zigzag":
            heads, tails = deal(segments, 2 * n, r), deal(segments, 2 * n, 2 * n - 1 - r)
            # What cuts next cuts the head and the tail of a segment each.
            segments = [run for pair in zip(heads, tails, strict=True) for run in pair]
        elif slot == "s":
            segments = deal(segments, n, r)
        else:
            segments = [(0, parts([u for _, units in segments for u in units], n)[r])]
    return [row for _, units in segments for unit in units for row in unit]


def deal(segments, n, r):
    """This part's run of each segment; spare units go round from where the last ones ended."""
    mine, turn = [], 0
    for i, units in segments:
        base, spare = divmod(len(units), n)
        shares = [base] * n
        for k in range(spare):
            shares[(turn + k) % n] += 1
        turn = (turn + spare) % n
        begin = sum(shares[:r])
        mine.append((i, units[begin : begin + shares[r]]))
    return mine


def balanced(segments, n, r):
    """The longest segment first, each to the rank that has least (then fewest) so far."""
    loads, mine = [(0, 0, rank) for rank in range(n)], set()
    for i, units in sorted(segments, key=lambda segment: -len(segment[1])):
        load, number, rank = min(loads)
        loads[rank] = (load + len(units), number + 1, rank)
        if rank == r:
            mine.add(i)
    return [segment for segment in segments if segment[0] in mine]


def rows_of_fused(dim, size, mesh, place):
    held = [list(range(length)) for length in size.lengths]
    flat = None
    for slot, axes, _ in dim.cuts:
        n, r = ranks_along(axes, mesh), place_along(axes, mesh, place)
        if slot == "all":
            flat = torch_chunk(flattened(held, size) if flat is None else flat, n, r)
        else:
            i = NAMES["fused"].index(slot)
            held[i] = torch_chunk(held[i], n, r)
    return flattened(held, size) if flat is None else flat


def flattened(held, size):
    return [h * size.lengths[1] + d for h in held[0] for d in held[1]]


ROWS = {"plain": rows_of_plain, "pack": rows_of_pack, "fused": rows_of_fused}


@lru_cache(maxsize=100_000)
def rows_of_dim(dim, size, mesh, rank):
    mesh = dict(mesh)
    return np.array(ROWS[dim.kind](dim, size, mesh, place_of(mesh, rank)), dtype=int)


def rows_of(spec, sizes, mesh, rank):
    """Global rows of each dim that a rank holds, in local order."""
    pairs = zip(spec.dims, sizes, strict=True)
    return [rows_of_dim(dim, size, tuple(mesh.items()), rank) for dim, size in pairs]


def total(dim, size):
    return size.lengths[0] * size.lengths[1] if dim.kind == "fused" else sum(size.lengths)


# ---------------------------------------------------------------- what a program must give


def integers(case, *key):
    """Seeded distinct integers in the shape of the whole tensor."""
    pairs = zip(case.src.dims, case.sizes, strict=True)
    return draw(case.seed, key, tuple(total(dim, size) for dim, size in pairs))


@lru_cache(maxsize=256)
def draw(seed, key, shape):
    rng = np.random.default_rng([seed, *key])
    return rng.permutation(int(np.prod(shape))).reshape(shape).astype(float) * 3 ** len(key) - 17


def axes_of(spec):
    return {*spec.pending, *(a for dim in spec.dims for cut in dim.cuts for a in cut.axes)}


def input_of(case, mesh, rank):
    """What a rank starts with: its block of its term."""
    place = place_of(mesh, rank)
    term = integers(case, *(place[axis] for axis in case.src.pending))
    return term[np.ix_(*rows_of(case.src, case.sizes, mesh, rank))]


def output_of(case, mesh, rank):
    """What a rank must end with: its block of the sum over what is no longer pending."""
    place = place_of(mesh, rank)
    kept = case.dst.pending
    ranges = [[place[a]] if a in kept else range(mesh[a]) for a in case.src.pending]
    whole = sum(integers(case, *term) for term in product(*ranges))
    return whole[np.ix_(*rows_of(case.dst, case.sizes, mesh, rank))]


def seed_of(case, mesh, rank):
    """A gradient of the result: the same over pending axes, any term over those it is whole on."""
    place = place_of(mesh, rank)
    key = [place[axis] for axis in mesh if axis not in case.dst.pending]
    return integers(case, 7, *key)[np.ix_(*rows_of(case.dst, case.sizes, mesh, rank))]


def summed(case, spec, mesh, blocks, fixed):
    """The whole gradient: the sum of all ranks' blocks at the fixed coordinates."""
    whole = np.zeros_like(integers(case))
    for rank, block in enumerate(blocks):
        place = place_of(mesh, rank)
        if all(place[axis] == at for axis, at in fixed.items()):
            np.add.at(whole, np.ix_(*rows_of(spec, case.sizes, mesh, rank)), block)
    return whole


def gradient_faults(case, mesh, gradients):
    """Coordinates at which the gradients of the input are wrong.

    Over axes that neither side names nothing is sent, so each coordinate stands alone. Over
    pending axes a gradient is the same on all ranks; the sum over all others is the gradient.
    """
    seeds = [seed_of(case, mesh, rank) for rank in range(count(mesh))]
    alone = [axis for axis in mesh if axis not in axes_of(case.src) | axes_of(case.dst)]
    faults = []
    for at in product(*(range(mesh[axis]) for axis in alone)):
        apart = dict(zip(alone, at, strict=True))
        right = summed(case, case.dst, mesh, seeds, {**apart, **dict.fromkeys(case.dst.pending, 0)})
        for term in product(*(range(mesh[axis]) for axis in case.src.pending)):
            fixed = {**apart, **dict(zip(case.src.pending, term, strict=True))}
            if not np.array_equal(summed(case, case.src, mesh, gradients, fixed), right):
                faults.append(fixed)
    return faults
