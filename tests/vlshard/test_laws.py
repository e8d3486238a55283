"""Laws of the spec language that hold for every spec, mesh and size."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlshard.fuzz import fuzz
from vlshard.language.dims import Packed
from vlshard.language.layout import layout
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing

LAWS = settings(derandomize=True, database=None, deadline=None, max_examples=200)
FEW = settings(LAWS, max_examples=40)
# Each mesh with the axes, or parts of axes, that one spec can name.
MESHES = [
    (MeshShape(dp=2, cp=3), {"dp": 2, "cp": 3}),
    (MeshShape(dp=2, cp=(2, 2)), {"dp": 2, "cp": 4}),
    (MeshShape(dp=2, cp=(2, 2)), {"cp.1": 2, "dp": 2, "cp.0": 2}),
    (MeshShape(cp={"ring": 2, "ulysses": 3}, tp=1), {"cp.ulysses": 3, "tp": 1, "cp.ring": 2}),
    (MeshShape(dp=1, cp=2, tp=2), {"dp": 1, "cp": 2, "tp": 2}),
]


CUTS = ("@cp", "@(cp dp)", "@(cp.1 dp cp.0)")


class Drawn:
    """A spec under construction: its axes are handed out once each."""

    def __init__(self, draw):
        self.draw = draw
        self.mesh, self.ranks = draw(st.sampled_from(MESHES))
        self.free = list(draw(st.permutations(list(self.ranks))))
        self.sizes = {}

    def splits(self, *orders):
        """Up to two splits, each over one or two axes, and the ranks of all; home at most once."""
        text, ranks = "", 1
        for _ in range(self.draw(st.integers(0, 2))):
            if not self.free:
                break
            wide = min(len(self.free), self.draw(st.sampled_from([1, 1, 2])))
            axes = [self.free.pop() for _ in range(wide)]
            order = self.draw(st.sampled_from([None, *orders]))
            joined = f"({' '.join(axes)})" if wide > 1 else axes[0]
            text += f"@{joined}" + (f".{order}" if order and ".home" not in text else "")
            ranks *= prod(self.ranks[axis] for axis in axes)
        return text, ranks

    def packing(self, name, marks, *, rows=False):
        """Segments (or rows) with homes for whatever ``.home`` split there is."""
        unit = 1 if rows else self.draw(st.integers(1, 3))
        units = st.just(1) if rows else st.integers(0, 4)
        lengths = [unit * n for n in self.draw(st.lists(units, max_size=6))]
        homes = next((part for part in marks.split("@") if part.endswith(".home")), "")
        ranks = prod(self.ranks[axis] for axis in homes.removesuffix(".home").strip("()").split())
        home = [self.draw(st.integers(0, ranks - 1)) for _ in lengths]
        self.sizes[name] = (lengths, unit, home, (1.0, 2.0))

    def plain(self, name):
        marks, _ = self.splits("zigzag", "home")
        if ".home" in marks:
            self.packing(name, marks, rows=True)
        else:
            self.sizes[name] = self.draw(st.integers(0, 13))
        return name + marks

    def packed(self):
        marks, _ = self.splits("balance", "home")
        inner, _ = self.splits("zigzag")
        self.packing("img", marks)
        return f"(img{marks} s{inner}){self.splits()[0]}"

    def fused(self):
        marks, ranks = self.splits()
        other, others = self.splits()
        self.sizes["h"] = ranks * self.draw(st.integers(0, 2))
        self.sizes["d"] = others * self.draw(st.integers(1, 2))
        return f"(2 h{marks} d{other}){self.splits()[0]}"


@st.composite
def layouts(draw):
    """What makes layouts of one to three dims of all kinds.

    They are bound by the tests: the shape hook draws random numbers, which strategies may not.
    """
    drawn = Drawn(draw)
    kinds = draw(st.permutations(["plain", "packed", "fused"]))[: draw(st.integers(1, 3))]
    make = {"plain": lambda: drawn.plain("b"), "packed": drawn.packed, "fused": drawn.fused}
    text = " ".join(make[kind]() for kind in kinds)
    if drawn.free and draw(st.booleans()):
        text += f" + {drawn.free.pop()}"
    return text, drawn.mesh, drawn.sizes


def bind(made):
    """The layout of what was drawn."""
    text, mesh, sizes = made
    packed = {name: Packing(*size) for name, size in sizes.items() if isinstance(size, tuple)}
    return layout(text, mesh, **{**sizes, **packed})


def split_parts(bound):
    """The parts of the mesh over which a dim is split."""
    splits = [axis for axis in bound.spec.axes if axis not in bound.spec.pending]
    return [part for axis in splits for part in bound.mesh.axis_parts(axis)]


def whole_units(dim, rows):
    """Whether rows of a pack come in whole units, each in order."""
    if not isinstance(dim, Packed):
        return True
    units = rows.reshape(-1, dim.packing.unit)
    return (units[:, 0] % dim.packing.unit == 0).all() and (np.diff(units, axis=1) == 1).all()


@LAWS
@given(layouts())
def test_every_index_is_held_once_by_each_group_of_replicas_in_whole_units(made):
    bound = bind(made)
    mesh = bound.mesh
    count = np.zeros(bound.shape, int)
    for rank in range(mesh.size):
        indices = bound.indices(rank)
        assert bound.local_shape(rank) == tuple(map(len, indices))
        assert all(map(whole_units, bound.bound, indices))
        held = np.zeros(bound.shape, int)
        np.add.at(held, np.ix_(*indices), 1)
        count += held
        assert held.max(initial=0) <= 1
    assert (count == mesh.size // mesh.span(split_parts(bound))).all()


@FEW
@given(layouts(), st.data())
def test_owners_are_the_ranks_that_hold_an_index(made, data):
    bound = bind(made)
    if 0 in bound.shape:
        return
    index = tuple(data.draw(st.integers(0, size - 1)) for size in bound.shape)
    holds = [
        all(i in held for i, held in zip(index, bound.indices(rank), strict=True))
        for rank in range(bound.mesh.size)
    ]
    assert bound.owners(index) == tuple(np.flatnonzero(holds).tolist())


@FEW
@given(
    st.sampled_from(["(img s)@cp", "(img s@cp)", "(img s)@(dp cp)", "(img s@(dp cp))"]), st.data()
)
def test_loads_of_unit_cuts_differ_by_at_most_one_unit(text, data):
    mesh = MeshShape(
        dp=data.draw(st.integers(1, 2)), cp=data.draw(st.sampled_from([(1, 5), (2, 2)]))
    )
    unit = data.draw(st.integers(1, 4))
    lengths = [unit * n for n in data.draw(st.lists(st.integers(0, 9), max_size=8))]
    loads = layout(text, mesh, img=Packing(lengths, unit)).loads()
    assert loads.max() - loads.min() <= unit
    assert loads.sum() == sum(lengths) * (
        mesh.size // mesh.span(["cp"] if "dp" not in text else ["dp", "cp"])
    )


@FEW
@given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 6))
def test_whole_segments_by_count_differ_by_at_most_one_segment(lengths, ranks):
    bound = layout("(img@cp s)", MeshShape(cp=ranks), img=Packing(lengths))
    places = [{"cp": rank} for rank in range(ranks)]
    counts = [len(bound.bound[0].held(place)) for place in places]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == len(lengths)


def best_largest(costs, ranks):
    """The least largest load of any way to deal segments, by trying all."""
    ways = product(range(ranks), repeat=len(costs))
    return min(
        max(sum(c for c, to in zip(costs, way, strict=True) if to == rank) for rank in range(ranks))
        for way in ways
    )


@FEW
@given(
    st.lists(st.integers(0, 12), max_size=6),
    st.integers(1, 3),
    st.sampled_from([(0, 1), (1, 0), (1, 7), (0.25, 3.5)]),
)
def test_balance_is_within_four_thirds_of_the_best(lengths, ranks, cost):
    text, mesh = "(img@cp.balance s)", MeshShape(cp=ranks)
    bound = layout(text, mesh, img=Packing([4 * n for n in lengths], 4, cost=cost))
    a, b = cost
    costs = [a * (4 * n) ** 2 + b * 4 * n for n in lengths]
    largest = bound.loads(by="cost").max()
    assert largest <= best_largest(costs, ranks) * 4 / 3 * (1 + 1e-12)


@FEW
@given(st.lists(st.integers(0, 5), max_size=9), st.integers(1, 4))
def test_balance_is_deterministic_and_keeps_the_order_of_segments(lengths, ranks):
    mesh = MeshShape(cp=ranks)
    once, again = (
        layout("(img@cp.balance s) c", mesh, img=Packing(lengths, cost=cost), c=c)
        for cost, c in (((1.0, 1.0), 1), ((2.0, 2.0), 2))
    )
    for rank in range(ranks):
        rows = once.indices(rank)[0]
        assert (np.diff(rows) > 0).all()
        assert rows.tolist() == again.indices(rank)[0].tolist()


def test_random_texts_raise_nothing_but_spec_errors():
    found, _ = fuzz(1000, seed=3)
    refused = sum(count for (_, said), count in found.items() if said == "refused")
    assert sum(found.values()) == 1000
    assert refused == pytest.approx(475, abs=100)
