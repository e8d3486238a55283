"""All places counted at once agree with the rows of each, at sizes small and very large."""

import random
import re
from math import lcm, prod

import numpy as np
import pytest

from vlshard.language.census import by_rank, counts, kept
from vlshard.language.errors import LayoutError
from vlshard.language.layout import layout
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing

TERA = 10**12


class Texts:
    """Random specs of one dim over the axes a, b, c and d, each used once at most."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.free = []

    def splits(self, *orders):
        text = ""
        for _ in range(self.random.randint(0, 2)):
            wide = min(len(self.free), self.random.choice([1, 1, 2]))
            if wide:
                axes = [self.free.pop() for _ in range(wide)]
                order = self.random.choice(["", "", *orders])
                text += f"@({' '.join(axes)})" + (order if ".home" not in text else "")
        return text

    def text(self, kind):
        self.free = self.random.sample("abcd", 4)
        match kind:
            case "plain":
                return f"x{self.splits('.zigzag')}"
            case "home":
                return f"x{self.splits('.zigzag', '.home')}"
            case "packed":
                segments, each = self.splits(".balance", ".home"), self.splits(".zigzag")
                return f"(x{segments} y{each}){self.splits()}"
            case _:
                deep = f"((x{self.splits()} 3 y{self.splits()}){self.splits()} z{self.splits()})"
                return deep + self.splits()

    def size(self, kind, homes):
        """The size of x: a number, or segments that are at home with some of the ranks."""
        if kind in ("plain", "fused"):
            return self.random.randint(0, 70) if kind == "plain" else 12
        unit = self.random.randint(1, 3) if kind == "packed" else 1
        units = [self.random.choice([0, 1, 2, 3, 5, 9, 30]) for _ in range(9)]
        lengths = [unit * n for n in units] if kind == "packed" else [1] * sum(units)
        home = [self.random.randrange(homes) for _ in lengths]
        return Packing(lengths, unit, home, cost=(1.0, 3.0), homes=homes)

    def pair(self, kind):
        """Two layouts of one tensor, or None where a factor cannot be dealt whole."""
        mesh = MeshShape(**{axis: self.random.choice([1, 2, 2, 3]) for axis in "abcd"})
        texts = [self.text(kind), self.text(kind)]
        found = [re.findall(r"@\(([^)]*)\)\.home", text) for text in texts]
        homes = lcm(*(mesh.span(axes.split()) for side in found for axes in side))
        sizes = {"x": self.size(kind, homes)}
        if kind == "fused":
            sizes |= {"y": self.random.choice([6, 12]), "z": self.random.choice([4, 12])}
        try:
            return [layout(text, mesh, **sizes) for text in texts]
        except LayoutError:
            return None


@pytest.mark.parametrize("kind", ["plain", "home", "packed", "fused"])
def test_what_all_places_hold_is_what_each_of_them_holds(kind):
    texts, compared = Texts(seed=1), 0
    for _ in range(40):
        if (pair := texts.pair(kind)) is None:
            continue
        ranks, mesh = range(pair[0].mesh.size), pair[0].mesh.parts
        held = [[{*one.indices(rank)[0].tolist()} for rank in ranks] for one in pair]
        for one, rows in zip(pair, held, strict=True):
            loads = by_rank(counts(one.bound[0], mesh), mesh)
            assert loads.tolist() == [len(own) for own in rows], one
            assert [one.local_shape(rank)[0] for rank in ranks] == loads.tolist()
        both = by_rank(kept(pair[0].bound[0], pair[1].bound[0], mesh), mesh)
        assert both.tolist() == [len(a & b) for a, b in zip(*held, strict=True)], pair
        compared += 1
    assert compared >= 15


def test_the_cost_of_all_places_is_that_of_their_rows():
    texts = Texts(seed=2)
    for _ in range(40):
        for one in texts.pair("packed"):
            packing = one.bound[0].packing
            cost = np.repeat(packing.lengths_array + 3.0, packing.lengths)
            rows = [cost[one.indices(rank)[0]].sum() for rank in range(one.mesh.size)]
            assert one.loads(by="cost").tolist() == rows, one  # whole numbers: exact


@pytest.mark.parametrize(
    ("text", "mesh", "sizes", "rank", "shape"),
    [
        ("(h@tp d) m", {"tp": 8}, {"h": 10**6, "d": 10**3, "m": 5}, 7, (125 * 10**6, 5)),
        ("(h d)@(dp tp)", {"dp": 7, "tp": 3}, {"h": TERA, "d": 10}, 20, (476190476180,)),
        ("s@cp.zigzag", {"cp": 4}, {"s": TERA + 3}, 0, (25 * 10**10 + 1,)),
        ("s@cp.zigzag", {"cp": 4}, {"s": TERA + 3}, 3, (25 * 10**10,)),
        (
            "s@a@b c@d",
            {"a": 3, "b": 7, "d": 2},
            {"s": TERA, "c": 10**6},
            0,
            (47619047620, 500_000),
        ),
        ("((3 h@a)@b d)@c", {"a": 2, "b": 3, "c": 4}, {"h": TERA, "d": 5}, 23, (625 * 10**9,)),
    ],
)
def test_layout_of_a_very_large_dim(text, mesh, sizes, rank, shape):
    bound = layout(text, MeshShape(**mesh), **sizes)
    assert bound.local_shape(rank) == shape
    assert bound.loads()[rank] == shape[0]


def test_layout_over_very_many_ranks():
    mesh = MeshShape(dp=256, tp=256)
    assert layout("(h@dp d@tp) m", mesh, h=512, d=512, m=8).loads().tolist() == [4] * 2**16
    loads = layout("s@(dp tp)", mesh, s=100_000).loads()
    assert (loads[:50_000].tolist(), loads[50_000:].any()) == ([2] * 50_000, False)
    pack = Packing([8] * 2**15 + [4] * 2**15, unit=4, cost=(1, 0))
    dealt = layout("(img@(dp tp).balance s)", mesh, img=pack)
    assert dealt.loads().tolist() == [8] * 2**15 + [4] * 2**15
    assert dealt.imbalance(by="cost") == 64 / 40
    assert layout("(img s@(dp tp))", mesh, img=pack).loads().tolist() == [8] * 2**15 + [4] * 2**15
    assert dealt.owners(8 * 2**15) == (2**15,)


@pytest.mark.parametrize(
    ("text", "index", "ranks"),
    [
        ("s@cp.zigzag m@dp", (TERA - 1, 4), (4,)),
        ("s@cp.zigzag m@dp", (TERA // 2, 0), (3,)),
        ("(s d@cp) m", (3 * TERA, 0), (0, 4)),
        ("(s d@cp)@dp m", (8 * TERA - 1, 0), (7,)),
    ],
)
def test_owners_in_a_very_large_dim(text, index, ranks):
    sizes = {"d": 8} if "d@" in text.split("m")[0] else {}
    bound = layout(text, MeshShape(dp=2, cp=4), s=TERA, m=5, **sizes)
    assert bound.owners(tuple(map(np.int64, index))) == ranks


def test_indices_are_those_of_one_rank_alone():
    mesh = MeshShape(tp=10**6)
    bound = layout("(h d@tp)", mesh, h=3, d=10**9)
    rows = bound.indices(999_999)[0]
    assert rows.size == 3000
    assert rows[[0, 999, 1000, -1]].tolist() == [
        10**9 - 1000,
        10**9 - 1,
        2 * 10**9 - 1000,
        3 * 10**9 - 1,
    ]


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        (
            "s",
            {"s": 2**62 + 1},
            "dim 's' has 4611686018427387905 indices, more than 2**62\n  s\n  ^",
        ),
        (
            "a b@dp",
            {"a": 2**31, "b": 2**32},
            "the tensor has 9223372036854775808 elements, more than 2**62\n  a b@dp\n  ^ ^^^^",
        ),
        ("s", {"s": 10**5000}, "dim 's' has about 2**16609 indices, more than 2**62\n  s\n  ^"),
        (
            "(img s)",
            {"img": Packing([2**62, 1])},
            "dim '(img s)' has 4611686018427387905 indices, more than 2**62\n  (img s)\n  ^^^^^^^",
        ),
    ],
)
def test_layout_refuses_more_than_can_be_counted(text, sizes, message):
    with pytest.raises(LayoutError) as error:
        layout(text, MeshShape(dp=2), **sizes)
    assert str(error.value) == message
    assert prod(layout("a b@dp", MeshShape(dp=2), a=2**31, b=2**31).local_shape(1)) == 2**61
