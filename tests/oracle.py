"""Brute force: who holds which rows, what a program must give, and which step it must be.

Plain index arithmetic over Python lists, written apart from the package. A dim is its kind and its
cuts in the order in which they apply; nothing is parsed. All data are integers in fp64, so that
every sum is exact.
"""

from functools import lru_cache
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

SLOTS = {"plain": ("",), "pack": ("img", "s", "all"), "fused": ("h", "all")}
ORDERS = {"": (None, "zigzag", "home"), "img": (None, "home"), "s": (None,), "all": (None,)}


class Cut(NamedTuple):
    slot: str
    axis: str
    order: str | None = None


class Dim(NamedTuple):
    kind: str
    name: str
    cuts: tuple[Cut, ...] = ()


class Spec(NamedTuple):
    dims: tuple[Dim, ...]
    pending: tuple[str, ...] = ()


class Size(NamedTuple):
    """A plain dim has ``lengths`` of 1; a fused one has two lengths, heads and width."""

    lengths: tuple[int, ...]
    unit: int = 1
    home: tuple[int, ...] = ()


class Case(NamedTuple):
    src: Spec
    dst: Spec
    sizes: tuple[Size, ...]
    seed: int


def text_of(spec):
    """The spec in the language."""
    dims = []
    for kind, name, cuts in spec.dims:
        marks = dict.fromkeys(SLOTS[kind], "")
        for slot, axis, order in cuts:
            marks[slot] += f"@{axis}" + (f".{order}" if order else "")
        if kind == "plain":
            dims.append(name + marks[""])
        elif kind == "pack":
            dims.append(f"(img{marks['img']} s{marks['s']}){marks['all']}")
        else:
            dims.append(f"(h{marks['h']} d){marks['all']}")
    return " ".join(dims + (["+", *spec.pending] if spec.pending else []))


def arrow_of(case):
    return f"{text_of(case.src)} -> {text_of(case.dst)}"


# ---------------------------------------------------------------- which specs there are


def cuts_of(kind, axes):
    """All ways to cut a dim over exactly these axes."""
    if not axes:
        return [()]
    found = []
    for order in permutations(axes):
        for slots in product(SLOTS[kind], repeat=len(axes)):
            if list(slots) != sorted(slots, key=SLOTS[kind].index):
                continue
            for orders in product(*(ORDERS[slot] for slot in slots)):
                if orders.count("home") < 2:
                    found.append(tuple(map(Cut, slots, order, orders)))
    return found


def specs_of(kinds, axes):
    """All specs of dims of these kinds over any of the axes, sums pending or not."""
    found = []
    places = [*range(len(kinds)), "whole", "pending"]
    for where in product(places, repeat=len(axes)):
        of = {p: tuple(a for a, w in zip(axes, where, strict=True) if w == p) for p in places}
        for cuts in product(*(cuts_of(kind, of[i]) for i, kind in enumerate(kinds))):
            dims = tuple(
                Dim(k, "abc"[i], c) for i, (k, c) in enumerate(zip(kinds, cuts, strict=True))
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


def rows_of_plain(dim, size, mesh, place):
    held = list(range(len(size.lengths)))
    for _, axis, order in dim.cuts:
        n, r = mesh[axis], place[axis]
        if order == "home":
            held = [row for row in held if size.home[row] == r]
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
        units = [rows[j : j + size.unit] for j in range(0, length, size.unit)]
        segments.append((size.home[i] if size.home else None, units))
        start += length
    for slot, axis, order in dim.cuts:
        n, r = mesh[axis], place[axis]
        if slot == "img" and order == "home":
            segments = [segment for segment in segments if segment[0] == r]
        elif slot == "img":
            segments = parts(segments, n)[r]
        elif slot == "s":
            segments = [
                (home, mine) for (home, _), mine in zip(segments, deal(segments, n, r), strict=True)
            ]
        else:
            segments = [(None, parts([u for _, units in segments for u in units], n)[r])]
    return [row for _, units in segments for unit in units for row in unit]


def deal(segments, n, r):
    """This rank's run of each segment; spare units go round from where the last ones ended."""
    mine, turn = [], 0
    for _, units in segments:
        base, spare = divmod(len(units), n)
        shares = [base] * n
        for i in range(spare):
            shares[(turn + i) % n] += 1
        turn = (turn + spare) % n
        begin = sum(shares[:r])
        mine.append(units[begin : begin + shares[r]])
    return mine


def rows_of_fused(dim, size, mesh, place):
    heads, width = size.lengths
    held = [[h * width + d for d in range(width)] for h in range(heads)]
    for slot, axis, _ in dim.cuts:
        if slot == "h":
            held = torch_chunk(held, mesh[axis], place[axis])
    flat = [row for head in held for row in head]
    for slot, axis, _ in dim.cuts:
        if slot == "all":
            flat = torch_chunk(flat, mesh[axis], place[axis])
    return flat


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
    return {*spec.pending, *(cut.axis for dim in spec.dims for cut in dim.cuts)}


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


# ---------------------------------------------------------------- which step it must be


def steps_of(src, dst, mesh):
    """The one-step programs between two specs, the preferred one first; none: several steps.

    ``()`` is the empty program; a step is (name, axes, dims).
    """
    big = {axis for axis, n in mesh.items() if n > 1}
    before, after = (
        [tuple(c for c in d.cuts if c.axis in big) for d in s.dims] for s in (src, dst)
    )
    gone = [a for a in src.pending if a not in dst.pending and a in big]
    differ = [i for i, cuts in enumerate(before) if cuts != after[i]]
    if not differ and not gone:
        return [()]
    found = []
    for axis in sorted(big):
        lost = [
            i
            for i in differ
            if before[i] and before[i][-1].axis == axis and before[i][:-1] == after[i]
        ]
        won = [
            i
            for i in differ
            if after[i] and after[i][-1].axis == axis and after[i][:-1] == before[i]
        ]
        if lost == differ and len(lost) == 1 and not gone:
            found.append(("AllGather", (axis,), tuple(lost)))
        if won == differ and len(won) == 1 and gone == [axis]:
            found.append(("ReduceScatter", (axis,), tuple(won)))
        if len(lost) == len(won) == 1 and sorted(lost + won) == differ and not gone:
            found.append(("AllToAll", (axis,), (*lost, *won)))
        if won == differ and len(won) == 1 and not gone:
            found.append(("Slice", (axis,), tuple(won)))
        if gone == [axis] and not differ:
            found.append(("AllReduce", (axis,), ()))
    if len(differ) == 1 and not gone and may_exchange(src, before, after, differ[0]):
        used = {cut.axis for cuts in (before, after) for cut in cuts[differ[0]]}
        found.append(("Exchange", tuple(a for a in mesh if a in used), tuple(differ)))
    return found


def may_exchange(src, before, after, i):
    """A packed or ordered split on a side, or two common axes in another order."""
    cuts = before[i] + after[i]
    if src.dims[i].kind == "pack" or any(cut.order for cut in cuts):
        return True
    orders = [[cut.axis for cut in side[i]] for side in (before, after)]
    common = set(orders[0]) & set(orders[1])
    return [a for a in orders[0] if a in common] != [a for a in orders[1] if a in common]


def label_of(dim):
    return {"plain": dim.name, "pack": "(img s)", "fused": "(h d)"}[dim.kind]
