"""What steps send is what the rows that ranks hold say, at sizes small and very large."""

from fractions import Fraction
from math import prod

import pytest

from tests.vlshard.language.test_census import Texts
from vlshard.language.layout import layout
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.language.spec import spec
from vlshard.programs.exchange_cost import ExchangeCost, symbolic_packing
from vlshard.programs.program import Program
from vlshard.programs.routes import route
from vlshard.programs.states import read_state
from vlshard.programs.steps import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, Slice
from vlshard.programs.traffic import at_rank, sent

TERA = 10**12


def by_rows(step, src, dst, rank):
    """What a rank sends forward and backward, from the rows that it sends and receives."""
    way = route(step, src, dst, rank)
    (leave, arrive), moves = way.dims, way.moves
    others = [
        prod(n for i, n in enumerate(side.local_shape(rank)) if i != dim)
        for side, dim in ((src, leave), (dst, arrive))
    ]
    return moves.rows_sent * others[0], moves.rows_received * others[1]


def assert_sent(step, src, dst):
    (found,) = sent((step,), (src, dst))
    for rank in range(src.mesh.size):
        counted = tuple(at_rank(grid, src.mesh, rank) for grid in found)
        assert counted == by_rows(step, src, dst, rank), (step, src, dst, rank)


@pytest.mark.parametrize("kind", ["plain", "home", "packed", "fused"])
def test_exchanges_send_what_their_rows_say(kind):
    texts = Texts(seed=3)
    pairs = [pair for _ in range(25) if (pair := texts.pair(kind))]
    for src, dst in pairs:
        axes = [*dict.fromkeys([*src.bound[0].axes, *dst.bound[0].axes])]
        axes = tuple(axis for axis in src.mesh.parts if axis in axes)
        assert_sent(Exchange(axes, src.spec.label(0)), src, dst)
    assert len(pairs) >= 10


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("s@dp@cp m -> s@dp m", AllGather("cp", "s")),
        ("s@(dp cp) m -> s m", AllGather("(dp cp)", "s")),
        ("s@dp m -> s@dp@cp m", Slice("cp", "s")),
        ("s m@dp + cp -> s@cp m@dp", ReduceScatter("cp", "s")),
        ("s@cp m -> s m@cp", AllToAll("cp", "s", "m")),
        ("s@dp.zigzag@cp m -> s@dp.zigzag m@cp", AllToAll("cp", "s", "m")),
        ("s@dp m@cp -> s m@cp@dp", AllToAll("dp", "s", "m")),
    ],
)
@pytest.mark.parametrize("size", [0, 5, 12, 31])
def test_steps_send_what_their_rows_say(text, step, size):
    mesh = MeshShape(dp=2, cp=3, tp=2)
    src, dst = (layout(side, mesh, s=size, m=7) for side in text.split(" -> "))
    assert_sent(step, src, dst)


@pytest.mark.parametrize("kind", ["plain", "home", "fused"])
def test_symbolic_exchanges_cost_what_rows_at_even_sizes_say(kind):
    texts, compared = Texts(seed=4), 0
    while compared < 12:
        if (pair := texts.pair(kind)) is None or pair[0].mesh.size > 12:
            continue
        mesh = pair[0].mesh
        ranks, zigzags = mesh.size, sum(n > 1 for n in mesh.parts.values())
        rows = ranks * 2**zigzags if kind == "plain" else ranks**2 * 2
        home = [k % ranks for k in range(rows)]
        sizes = {
            "plain": {"x": rows},
            "home": {"x": Packing([1] * rows, home=home, homes=ranks)},
            "fused": dict.fromkeys("xyz", ranks),
        }
        before, after = (read_state(side.spec, mesh).dims[0] for side in pair)
        if before == after:
            continue
        src, dst = (layout(side.spec, mesh, **sizes[kind]) for side in pair)
        used = {axis for cut in (*before, *after) for axis in cut.axes}
        step = Exchange(tuple(a for a in mesh.parts if a in used), src.spec.label(0))
        group = mesh.peers(step.axes, 0)
        counted = [by_rows(step, src, dst, rank)[0] for rank in group]
        cost = ExchangeCost(src.spec.dims[0], mesh.parts)
        found = cost.sent(before, after)
        most, total = (Fraction(n, src.shape[0]) for n in (max(counted), sum(counted)))
        assert (Fraction(found.most, cost.rows), Fraction(found.total, cost.rows)) == (most, total)
        compared += 1


@pytest.mark.parametrize(
    ("text", "mesh", "step", "sizes", "forward", "backward"),
    [
        # A rank whose two places are the same keeps its 256 * 256 rows, the others keep none.
        (
            "(h@dp d@tp) m -> (h@tp d@dp) m",
            {"dp": 256, "tp": 256},
            Exchange(("dp", "tp"), "(h d)"),
            {"h": 2**16, "d": 2**16, "m": 2},
            2**17,
            2**17,
        ),
        # A rank whose four places are not all the same keeps none of its 16**4 rows.
        (
            "(h@a g@b k@c d@d) m -> (h@b g@c k@d d@a) m",
            {"a": 16, "b": 16, "c": 16, "d": 16},
            Exchange(("a", "b", "c", "d"), "(h g k d)"),
            {"h": 256, "g": 256, "k": 256, "d": 256, "m": 3},
            3 * 16**4,
            3 * 16**4,
        ),
        (
            "s@(dp tp) m -> s m",
            {"dp": 256, "tp": 256},
            AllGather("(dp tp)", "s"),
            {"s": 10**9, "m": 1},
            65535 * 15259,
            10**9 - 10**9 % 15259,
        ),
        (
            "s m + dp -> s m",
            {"dp": 3},
            AllReduce("dp"),
            {"s": TERA, "m": 2},
            -(-8 * TERA // 3),
            -(-8 * TERA // 3),
        ),
    ],
)
def test_steps_at_very_large_sizes(text, mesh, step, sizes, forward, backward):
    src, dst = text.split(" -> ")
    program = Program(spec(src), spec(dst), MeshShape(**mesh), (step,))
    last = program.describe(itemsize=1, **sizes).splitlines()[-1]
    told = f"  a rank sends at most {forward:,} bytes in all, in backward {backward:,}"
    assert last.startswith(told)


def test_packs_dealt_over_65536_ranks_say_what_they_send():
    mesh = MeshShape(dp=2048, cp=32)
    pack = Packing([4] * 2**16, unit=4, home=[i // 32 for i in range(2**16)], cost=(1, 0))
    src, dst = "(img@(dp cp).balance s) c", "(img@dp.home s) c"
    program = Program(spec(src), spec(dst), mesh, (Exchange(("dp", "cp"), "(img s)"),))
    # Segment i is on rank i and at home with its 32 neighbours: 31 of them want it of that rank.
    assert [
        program.bytes_sent(rank=rank, itemsize=1, img=pack, c=10) for rank in (0, 2**16 - 1)
    ] == [(31 * 40, 31 * 40)] * 2


def symbolic(text, mesh):
    """What an exchange costs without sizes, as fractions of the dim."""
    sides = [spec(side) for side in text.split(" -> ")]
    before, after = (read_state(side, mesh).dims[0] for side in sides)
    dim = sides[0].dims[0]
    packing = symbolic_packing((before, after), mesh.parts) if "img" in text else None
    cost = ExchangeCost(dim, mesh.parts, packing)
    return [Fraction(rows, cost.rows) for rows in cost.sent(before, after)]


@pytest.mark.parametrize(
    ("text", "most", "total"),
    [
        # The ranks whose two places are the same, one in 256 of all, keep what they have.
        ("(h@dp d@tp) -> (h@tp d@dp)", Fraction(1, 2**16), 1 - Fraction(1, 256)),
        ("(h g@dp@tp) -> (h g@tp@dp)", Fraction(1, 2**16), 1 - Fraction(1, 256)),
        ("s@dp@tp -> s@tp@dp", Fraction(1, 2**16), 1 - Fraction(1, 256)),
        # Where rows are at home says nothing of where they are cut.
        ("s@dp.home -> s@dp", Fraction(255, 2**16), Fraction(255, 256)),
        ("s@dp.home@tp -> s@tp@dp", Fraction(255, 2**24), Fraction(255, 256)),
        # Rank r has the blocks r and 511 - r of 512 before, 2r and 2r + 1 after: rank 0 keeps the
        # first, rank 170 the block 341, and nobody else anything.
        ("s@dp.zigzag -> s@dp", Fraction(2, 512), 1 - Fraction(2, 512)),
        # Of a segment, the 256 ranks where it is at home keep a part each, of 65,536.
        ("(img@dp.home s) -> (img s@(dp tp))", Fraction(255, 2**16), Fraction(255, 256)),
        ("(img@dp s@tp) -> (img@tp s@dp)", Fraction(1, 2**16), 1 - Fraction(1, 256)),
        ("(img@dp s)@tp -> (img@dp s@tp)", 0, 0),
    ],
)
def test_symbolic_exchanges_over_65536_ranks(text, most, total):
    assert symbolic(text, MeshShape(dp=256, tp=256)) == [most, total]
