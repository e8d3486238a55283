import ast
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vlshard
from vlshard.comm.mesh import Mesh
from vlshard.language.errors import LayoutError, PlanError
from vlshard.language.layout import layout
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.language.spec import arrow, spec

LAWS = settings(derandomize=True, database=None, deadline=None, max_examples=120)
MESH = MeshShape(dp=2, cp=2)
PACK = Packing([8, 4, 12, 4], unit=4, home=[0, 1, 0, 1])


def units(*numbers):
    """Rows of the given units of four rows."""
    return [4 * number + row for number in numbers for row in range(4)]


def first_dims(text, mesh, **sizes):
    bound = layout(text, mesh, **sizes)
    return [bound.indices(rank)[0].tolist() for rank in range(mesh.size)]


@pytest.mark.parametrize(
    ("text", "size", "held"),
    [
        ("s@cp", 10, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
        ("s@cp", 5, [[0, 1], [2, 3], [4], []]),
        ("s@cp", 0, [[], [], [], []]),
        ("s@cp.zigzag", 16, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        ("s@cp.zigzag", 11, [[0, 1, 10], [2, 3, 9], [4, 5, 8], [6, 7]]),
        ("s@cp.zigzag", 3, [[0], [1], [2], []]),
        ("s", 2, [[0, 1]] * 4),
        ("s + cp", 2, [[0, 1]] * 4),
    ],
)
def test_layout_of_a_plain_dim(text, size, held):
    assert first_dims(text, MeshShape(cp=4), s=size) == held


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("s@dp@cp", [[0, 1, 2], [3, 4], [5, 6], [7, 8]]),
        ("s@cp@dp", [[0, 1, 2], [5, 6], [3, 4], [7, 8]]),
        ("s@cp.zigzag@dp", [[0, 1, 2], [3, 4], [7, 8], [5, 6]]),
        ("s@dp@cp.zigzag", [[0, 1, 4], [2, 3], [5, 8], [6, 7]]),
    ],
)
def test_layout_applies_splits_left_to_right(text, held):
    assert first_dims(text, MESH, s=9) == held


def test_layout_keeps_rows_at_home():
    rows = Packing([1] * 5, home=[1, 0, 1, 1, 0])
    bound = layout("b@dp.home s@cp", MESH, b=rows, s=3)
    assert bound.shape == (5, 3)
    assert [[i.tolist() for i in bound.indices(rank)] for rank in range(4)] == [
        [[1, 4], [0, 1]],
        [[1, 4], [2]],
        [[0, 2, 3], [0, 1]],
        [[0, 2, 3], [2]],
    ]
    assert [bound.local_shape(rank) for rank in range(4)] == [(2, 2), (2, 1), (3, 2), (3, 1)]


def test_layout_may_leave_ranks_without_rows():
    rows = Packing([1, 1], home=[1, 1])
    assert first_dims("b@dp.home@cp", MESH, b=rows) == [[], [], [0], [1]]
    nothing = Packing([], unit=4, home=[])
    for text in ("b@dp.home", "b"):
        assert first_dims(text, MESH, b=Packing([], home=[])) == [[]] * 4
    for text in ("(img@dp.home s)@cp", "(img@cp s@dp)", "(img s@cp)"):
        assert first_dims(text, MESH, img=nothing) == [[]] * 4


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("(img s)", [units(0, 1, 2, 3, 4, 5, 6)] * 4),
        ("(img s)@cp", [units(0, 1, 2, 3), units(4, 5, 6)] * 2),
        ("(img s@cp)", [units(0, 2, 3, 6), units(1, 4, 5)] * 2),
        ("(img@cp s)", [units(0, 1, 2), units(3, 4, 5, 6)] * 2),
        ("(img@dp.home s)", [units(0, 1, 3, 4, 5)] * 2 + [units(2, 6)] * 2),
        ("(img@dp.home s)@cp", [units(0, 1, 3), units(4, 5), units(2), units(6)]),
        ("(img@dp.home s@cp)", [units(0, 3, 4), units(1, 5), units(2), units(6)]),
        ("(img@dp.home@cp s)", [units(0, 1), units(3, 4, 5), units(2), units(6)]),
        ("(img@cp s@dp)", [units(0, 2), units(3, 4), units(1), units(5, 6)]),
        ("(img s@dp)@cp", [units(0, 2), units(3, 6), units(1, 4), units(5)]),
        ("(img s)@cp@dp", [units(0, 1), units(4, 5), units(2, 3), units(6)]),
    ],
)
def test_layout_of_a_pack(text, held):
    assert first_dims(text, MESH, img=PACK) == held


def test_layout_of_a_pack_after_merging_is_the_same_in_units():
    merged = Packing([length // 4 for length in PACK.lengths], home=PACK.home)
    for text in ("(img@dp.home s)@cp", "(img@dp.home s@cp)", "(img@cp s)", "(img s@dp)@cp"):
        rows = first_dims(text, MESH, img=PACK)
        assert [units(*numbers) for numbers in first_dims(text, MESH, img=merged)] == rows


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("(h@cp d)", [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]] * 2),
        ("(h d)@cp", [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]] * 2),
        ("(h@dp d)@cp", [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
        ("(h@cp@dp d)", [[0, 1, 2], [6, 7, 8], [3, 4, 5], [9, 10, 11]]),
        ("((h d) 1)@cp", [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]] * 2),
    ],
)
def test_layout_of_a_fused_dim(text, held):
    assert first_dims(text, MESH, h=4, d=3) == held


def test_layout_of_a_fused_dim_with_a_fixed_factor():
    bound = layout("(3 h)@cp 2", MESH, h=3)
    assert (bound.shape, bound.local_shape(0), bound.local_shape(1)) == ((9, 2), (5, 2), (4, 2))


def test_layout_of_no_dims():
    bound = layout("+ dp cp", MESH)
    assert (bound.shape, bound.indices(3), bound.axes) == ((), (), ("dp", "cp"))


def test_layout_knows_its_parts():
    bound = layout("b@dp s@cp", Mesh(dp=2, cp=2), where="text.q", b=4, s=6)
    assert bound.spec == spec("b@dp s@cp")
    assert bound.mesh == MESH
    assert (bound.axes, bound.where, dict(bound.sizes)) == (
        ("dp", "cp"),
        "text.q",
        {"b": 4, "s": 6},
    )
    assert bound == layout("b@dp s@cp", MESH, b=4, s=6)
    assert bound != layout("b@dp s@cp", MESH, b=4, s=7)


def test_layout_is_cached_and_its_arrays_are_not():
    bound = layout("(img@dp.home s)@cp c", MESH, img=PACK, c=3)
    again = Packing(PACK.lengths, PACK.unit, PACK.home)
    assert layout("(img@dp.home s)@cp c", MESH, img=again, c=3) is bound
    bound.indices(0)[0][:] = -1
    assert bound.indices(0)[0].tolist() == units(0, 1, 3)
    assert bound.indices(0)[0].dtype == np.int64


def test_layout_of_many_ranks():
    mesh = MeshShape(dp=8192, cp=8)
    bound = layout("b@dp s@cp.zigzag m", mesh, b=16384, s=32, m=1)
    rows, positions, _ = bound.indices(65535)
    assert (rows.tolist(), positions.tolist()) == ([16382, 16383], [14, 15, 16, 17])
    with pytest.raises(PlanError, match="rank 65536 is not on the mesh of 65536 ranks"):
        bound.indices(65536)


@LAWS
@given(st.integers(0, 40), st.integers(1, 6))
def test_plain_blocks_are_torch_chunks(size, ranks):
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(ranks)]
    chunks += [[]] * (ranks - len(chunks))
    assert first_dims("s@cp", MeshShape(cp=ranks), s=size) == (chunks if size else [[]] * ranks)


def draw_packing(data, homes):
    """A packing; made outside of strategies, where the shape hook may not draw random numbers."""
    unit = data.draw(st.sampled_from([1, 4]))
    counts = data.draw(st.lists(st.integers(0, 9), max_size=7))
    home = [data.draw(st.integers(0, homes - 1)) for _ in counts]
    return Packing([unit * count for count in counts], unit, home)


PACKED = [
    f"(img{first} s{each}){whole}"
    for first, each, whole in itertools.product(
        ("", "@dp", "@dp.home", "@dp.home@cp", "@cp"), ("", "@cp", "@ep"), ("", "@cp", "@ep@cp")
    )
    if (first + each + whole).count("@cp") <= 1 and (each + whole).count("@ep") <= 1
]


def assert_each_row_is_held_once(bound, dim=0):
    """Ranks that differ along the axes that cut hold each row once; others hold the same."""
    axes = [axis.name for axis in bound.spec.axes]
    rest = [axis for axis in bound.mesh.sizes if axis not in axes]
    for rank in range(bound.mesh.size):
        held = [bound.indices(peer)[dim] for peer in bound.mesh.peers(axes, rank)]
        assert sorted(np.concatenate(held).tolist()) == list(range(bound.shape[dim]))
        mine = bound.indices(rank)[dim].tolist()
        for copy in bound.mesh.peers(rest, rank):
            assert bound.indices(copy)[dim].tolist() == mine
        assert bound.local_shape(rank)[dim] == len(mine)


@pytest.mark.parametrize("text", PACKED)
@settings(LAWS, max_examples=12)
@given(data=st.data())
def test_packs_are_held_once_in_whole_units(text, data):
    sizes = {axis: data.draw(st.integers(1, 3)) for axis in ("dp", "cp", "ep")}
    packing = draw_packing(data, sizes["dp"])
    bound = layout(text, MeshShape(**sizes), img=packing)
    assert_each_row_is_held_once(bound)
    for rank in range(bound.mesh.size):
        rows = bound.indices(rank)[0].reshape(-1, packing.unit)
        assert (rows == rows[:, :1] + np.arange(packing.unit)).all()
        assert (rows[:, 0] % packing.unit == 0).all()


@LAWS
@given(st.sampled_from(["", "@dp", "@dp.home", "@cp.zigzag@dp", "@dp@cp", "@cp"]), st.data())
def test_plain_rows_are_held_once(splits, data):
    mesh = MeshShape(dp=data.draw(st.integers(1, 3)), cp=data.draw(st.integers(1, 3)))
    count = data.draw(st.integers(0, 20))
    home = [data.draw(st.integers(0, mesh.sizes["dp"] - 1)) for _ in range(count)]
    size = Packing([1] * count, home=home) if "home" in splits else count
    assert_each_row_is_held_once(layout(f"b{splits}", mesh, b=size))


@LAWS
@given(st.data(), st.integers(1, 5))
def test_cuts_of_segments_go_round_and_differ_by_one_unit(data, ranks):
    packing = draw_packing(data, 1)
    counts = np.array(packing.lengths, int) // packing.unit
    turns = itertools.cycle(range(ranks))
    expected = np.zeros((len(counts), ranks), int)
    for segment, count in enumerate(counts):
        expected[segment] = count // ranks
        for _ in range(count % ranks):
            expected[segment, next(turns)] += 1
    bound = layout("(img s@cp)", MeshShape(cp=ranks), img=packing)
    ends = np.cumsum(packing.lengths, dtype=int)
    loads = [bound.indices(rank)[0] for rank in range(ranks)]
    found = [
        np.bincount(np.searchsorted(ends, rows, "right"), minlength=len(ends)) for rows in loads
    ]
    assert (np.array(found).T == expected * packing.unit).all()
    totals = [len(rows) // packing.unit for rows in loads]
    assert max(totals) - min(totals) <= 1
    for segment, end in enumerate(ends):
        rows = [rows[(rows >= end - packing.lengths[segment]) & (rows < end)] for rows in loads]
        assert (np.diff(np.concatenate(rows)) == 1).all()


@LAWS
@given(st.data(), st.integers(1, 5), st.sampled_from(["(img s)@cp", "(img@dp.home s)@cp"]))
def test_cuts_of_the_pack_are_contiguous_and_differ_by_one_unit(data, ranks, text):
    packing = draw_packing(data, 2)
    bound = layout(text, MeshShape(dp=2, cp=ranks), img=packing)
    for dp in range(2):
        rows = [bound.indices(ranks * dp + rank)[0] for rank in range(ranks)]
        loads = [len(part) // packing.unit for part in rows]
        assert loads == sorted(loads, reverse=True)
        assert max(loads) - min(loads) <= 1
        assert (np.diff(np.concatenate(rows)) > 0).all()


@LAWS
@given(st.integers(0, 40), st.integers(1, 5))
def test_zigzag_deals_head_and_tail(size, ranks):
    block, extra = divmod(size, 2 * ranks)
    bounds = np.cumsum([0] + [block + (k < extra) for k in range(2 * ranks)])
    chunks = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    held = first_dims("s@cp.zigzag", MeshShape(cp=ranks), s=size)
    assert held == [chunks[r] + chunks[2 * ranks - 1 - r] for r in range(ranks)]


@pytest.mark.parametrize("text", ["b@dp.home s@cp.zigzag", "b@dp.home s"])
def test_axes_of_size_one_cost_nothing(text):
    mesh, rows = MeshShape(dp=1, cp=1), Packing([1] * 3, home=[0] * 3)
    assert [i.tolist() for i in layout(text, mesh, b=rows, s=4).indices(0)] == [
        [0, 1, 2],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize(
    ("text", "sizes", "carets", "headline", "notes"),
    [
        (
            "b s@xp h d",
            {},
            "    ^^",
            "unknown mesh axis 'xp'",
            ["mesh: dp=2 cp=8; did you mean 'cp' or 'dp'?"],
        ),
        ("b s + tensor", {}, "      ^^^^^^", "unknown mesh axis 'tensor'", ["mesh: dp=2 cp=8"]),
        (
            "b s@cp (h d)",
            {"s": 4, "d": 2},
            "^       ^",
            "missing size of 'b', 'h'",
            ["give b=..., h=..."],
        ),
        ("b s", {"b": 2, "s": -1}, "  ^", "size s=-1 is negative", []),
        ("b s", {"b": True, "s": 1}, "^", "size b=True is no integer and no Packing", []),
        (
            "b s",
            {"b": 2, "s": 1, "sx": 1},
            None,
            "size sx= is for no dim of the spec",
            ["names: b s; did you mean 's'?"],
        ),
        ("b ... s", {"b": 1, "s": 1}, "  ^^^", "'...' has no sizes: name its dims", []),
        (
            "b s",
            {"b": Packing([2, 1]), "s": 1},
            "^",
            "the Packing of plain dim 'b' must have segments of one row each",
            ["a packed dim is a bracket: '(b s)'"],
        ),
        (
            "b@dp.home s",
            {"b": 4, "s": 1},
            "     ^^^^",
            "'.home' needs to know who holds each row of 'b'",
            ["give b=Packing([1] * rows, home=[...])"],
        ),
        (
            "b@dp.home s",
            {"b": Packing([1, 1]), "s": 1},
            "     ^^^^",
            "'.home' needs to know who holds each row of 'b'",
            ["give b=Packing([1] * rows, home=[...])"],
        ),
        (
            "b@dp.home s",
            {"b": Packing([1, 1], home=[0, 2]), "s": 1},
            " ^^^^^^^^",
            "row 1 of 'b' has home 2, out of range",
            ["mesh: dp=2 cp=8"],
        ),
        (
            "(img@dp.home s)@cp c",
            {"img": Packing([8], 4), "c": 1},
            "        ^^^^",
            "'.home' needs to know who holds each segment of 'img'",
            ["give img=Packing(lengths, home=[...])"],
        ),
        (
            "(img@dp.home s)@cp c",
            {"img": Packing([8], 4, home=[5]), "c": 1},
            "    ^^^^^^^^",
            "segment 0 of 'img' has home 5, out of range",
            ["mesh: dp=2 cp=8"],
        ),
        (
            "(img@dp.home s)",
            {"img": 3, "s": 4},
            "        ^^^^",
            "'.home' needs to know who holds each segment of 'img'",
            ["give img=Packing(lengths, home=[...])"],
        ),
        (
            "(img s)",
            {"img": PACK, "s": 4},
            "     ^",
            "'s' takes no size: the Packing of 'img' has them",
            [],
        ),
        (
            "(h img)",
            {"h": 2, "img": PACK},
            "   ^^^",
            "a Packing goes with the first name of a bracket, not 'img'",
            [],
        ),
        (
            "(img s c)",
            {"img": PACK},
            " ^^^^^^^",
            "a packed dim has two names, its segments and their rows: '(img s)'",
            [],
        ),
        (
            "(h@cp d) m",
            {"h": 6, "d": 4, "m": 1},
            " ^^^^",
            "h=6 cannot be dealt whole to cp=8",
            ["fix: degrees 1, 2, 3, 6 work"],
        ),
        (
            "b@dp s",
            {"b": 2**63, "s": 1},
            "^^^^",
            f"dim 'b' has {2**63} indices, more than 2**62",
            [],
        ),
        (
            "b (h d)@dp",
            {"b": 1, "h": 2**40, "d": 2**40},
            "  ^^^^^^^^",
            f"dim '(h d)' has {2**80} indices, more than 2**62",
            [],
        ),
    ],
)
def test_layout_points_at_the_fault(text, sizes, carets, headline, notes):
    place = "plans/long.py:41 text.q: "
    with pytest.raises(LayoutError) as error:
        layout(text, MeshShape(dp=2, cp=8), where="plans/long.py:41 text.q", **sizes)
    lines = [place + text, *([] if carets is None else [" " * len(place) + carets]), *notes]
    assert str(error.value) == "\n  ".join([headline, *lines])


@pytest.mark.parametrize(
    ("text", "sizes", "carets", "headline", "notes"),
    [
        (
            "s@cp.2",
            {"s": 4},
            "  ^^^^",
            "mesh axis 'cp' has no part '2'",
            ["mesh: dp=2 cp=(2, 4); did you mean 'cp.0' or 'cp.1'?"],
        ),
        (
            "s + dp.0",
            {"s": 4},
            "    ^^^^",
            "mesh axis 'dp' is not split, so it has no part '0'",
            ["mesh: dp=2 cp=(2, 4)"],
        ),
        (
            "s@dp.zigzga",
            {"s": 4},
            "  ^^^^^^^^^",
            "mesh axis 'dp' is not split, so it has no part 'zigzga'",
            ["mesh: dp=2 cp=(2, 4)", "'.zigzga' is no order; did you mean '.zigzag'?"],
        ),
        (
            "(3 h@(dp cp) d)",
            {"h": 6, "d": 4},
            "   ^^^^^^^^^",
            "h=6 cannot be dealt whole to (dp cp)=16",
            ["fix: degrees 1, 2, 3, 6 work"],
        ),
        (
            "(h d@cp.0)",
            {"h": 6, "d": 5},
            "   ^^^^^^",
            "d=5 cannot be dealt whole to cp.0=2",
            ["fix: degrees 1, 5 work"],
        ),
        (
            "(h@dp.balance d)",
            {"h": 6, "d": 5},
            "      ^^^^^^^",
            "'.balance' is for packed dims, and '(h d)' is fused",
            ["give h=Packing(lengths)"],
        ),
        (
            "(h d@dp.zigzag)",
            {"h": 6, "d": 4},
            "        ^^^^^^",
            "'.zigzag' is for packed dims, and '(h d)' is fused",
            ["give h=Packing(lengths)"],
        ),
        (
            "(img@dp.home s)",
            {"img": Packing([4], home=[0], homes=3)},
            "    ^^^^^^^^",
            "homes=3 of 'img' is no multiple of the 2 ranks here",
            ["mesh: dp=2 cp=(2, 4)"],
        ),
    ],
)
def test_layout_points_at_faults_of_parts_and_factors(text, sizes, carets, headline, notes):
    with pytest.raises(LayoutError) as error:
        layout(text, MeshShape(dp=2, cp=(2, 4)), where="text.q", **sizes)
    lines = [f"text.q: {text}", f"        {carets}", *notes]
    assert str(error.value) == "\n  ".join([headline, *lines])


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("s@(dp cp)", [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
        ("s@dp@cp", [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]),
        ("s@(cp dp)", [[0, 1, 2], [6, 7, 8], [3, 4, 5], [9]]),
        ("s@(dp cp).zigzag", [[0, 1, 9], [2, 3, 8], [4, 7], [5, 6]]),
    ],
)
def test_joined_axes_cut_as_one(text, held):
    assert first_dims(text, MESH, s=10) == held
    parts = MeshShape(x=(2, 2))
    assert first_dims(text.replace("dp", "x.0").replace("cp", "x.1"), parts, s=10) == held
    if "(dp cp)" in text:
        assert first_dims(text.replace("(dp cp)", "x"), parts, s=10) == held


def test_a_pack_cut_over_joined_axes():
    assert first_dims("(img s)@(dp cp)", MESH, img=PACK) == [
        units(0, 1),
        units(2, 3),
        units(4, 5),
        units(6),
    ]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("(3 h@cp d)", [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]] * 2),
        ("(3 h@cp d@dp)", [[0, 4, 8], [2, 6, 10], [1, 5, 9], [3, 7, 11]]),
        ("(3 h@cp d)@dp", [[0, 1, 4], [2, 3, 6], [5, 8, 9], [7, 10, 11]]),
        ("(3 (h d)@(dp cp))", [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]),
        ("(3 (h@cp d)@dp)", [[0, 4, 8], [2, 6, 10], [1, 5, 9], [3, 7, 11]]),
    ],
)
def test_inner_splits_cut_each_block(text, held):
    assert first_dims(text, MESH, h=2, d=2) == held


def test_zigzag_in_a_pack_cuts_each_segment_and_deals_spare_units_round():
    # Units of segments: 0 1 2 | 3 4 5 6 7 | 8; four parts each, the first three of the first
    # segment, then the fourth of the second and the first of the third have one unit more.
    packing = Packing([12, 20, 4], unit=4)
    assert first_dims("(smp s@cp.zigzag)", MeshShape(cp=2), smp=packing) == [
        units(0, 3, 6, 7, 8),
        units(1, 2, 4, 5),
    ]


BALANCED = Packing([4, 16, 8, 4, 8], unit=4, cost=(1, 0), home=[0, 1, 0, 1, 0])


@pytest.mark.parametrize(
    ("text", "held"),
    [
        # Costs 16 256 64 16 64: the second segment alone, all others together.
        ("(img@cp.balance s)", [[1], [0, 2, 3, 4]] * 2),
        ("(img@(dp cp).balance s)", [[1], [2], [4], [0, 3]]),
        ("(img@dp.home@cp.balance s)", [[0, 2], [4], [1], [3]]),
    ],
)
def test_balance_deals_costly_segments_first(text, held):
    ends = np.cumsum(BALANCED.lengths)
    rows = [[*range(end - n, end)] for end, n in zip(ends, BALANCED.lengths, strict=True)]
    expected = [[row for segment in part for row in rows[segment]] for part in held]
    assert first_dims(text, MESH, img=BALANCED) == expected


def test_home_over_the_leading_home_axes_is_the_union_in_order():
    packing = Packing([4, 4, 4, 4, 4], unit=4, home=[3, 0, 2, 1, 0], homes=4)
    assert first_dims("(img@(dp cp).home s)", MESH, img=packing) == [
        units(1, 4),
        units(3),
        units(2),
        units(0),
    ]
    assert first_dims("(img@dp.home s)", MESH, img=packing)[::2] == [units(1, 3, 4), units(0, 2)]


def test_owners_are_the_ranks_that_hold_an_element():
    bound = layout("b@dp s@cp.0 h", MeshShape(dp=2, cp=(2, 2)), b=2, s=4, h=3)
    assert bound.owners((1, 2, 0)) == (6, 7)
    assert layout("s@cp.zigzag", MESH, s=8).owners(7) == (0, 2)
    assert layout("+ dp", MESH).owners(()) == (0, 1, 2, 3)
    with pytest.raises(LayoutError) as error:
        bound.owners((1, 4, 0))
    assert str(error.value) == (
        "a tensor of shape (2, 4, 3) has no element (1, 4, 0)\n  b@dp s@cp.0 h"
    )


def test_loads_by_rows_and_by_cost():
    packing = Packing([4, 12], unit=4, cost=(1, 2))
    bound = layout("(img s)@cp c", MeshShape(cp=2), img=packing, c=3)
    assert bound.loads().tolist() == [8, 8]
    # Each row of the first segment costs 4 + 2, of the second 12 + 2.
    assert bound.loads(by="cost").tolist() == [4 * 6 + 4 * 14, 8 * 14]
    assert bound.imbalance() == 1.0
    assert bound.imbalance(by="cost") == 112 / 96
    assert bound.loads(1, by="cost").tolist() == [3, 3]
    assert layout("(img s)@cp", MESH, img=Packing([])).imbalance() == 1.0


def test_layout_of_one_side_of_an_arrow_shows_the_whole_arrow():
    src, dst = arrow("b s@cp -> b@xp s")
    assert layout(src, MESH, b=2, s=4).shape == (2, 4)
    with pytest.raises(LayoutError) as error:
        layout(dst, MESH, b=2, s=4)
    assert str(error.value).split("\n")[1:3] == ["  b s@cp -> b@xp s", "              ^^"]


LANGUAGE = Path(vlshard.__file__).parent / "language"
FILES = sorted(path.stem for path in LANGUAGE.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", FILES)
def test_the_language_needs_no_torch(name):
    tree = ast.parse((LANGUAGE / f"{name}.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {a.name for node in imports if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    if name == "placements":  # DTensor's words for layouts, as types
        names -= {"torch.distributed.tensor"}
    allowed = {f"vlshard.language.{other}" for other in FILES}
    assert {n for n in names if n.startswith("vlshard")} <= allowed
    assert not {n for n in names if n.split(".")[0] == "torch"}


def test_integers_of_numpy_are_sizes():
    one, two, four = np.int64(1), np.int32(2), np.uint8(4)
    mesh = MeshShape(dp=two, cp=(two, one))
    assert mesh == MeshShape(dp=2, cp=(2, 1)) and repr(mesh) == "MeshShape(dp=2, cp=(2, 1))"
    found = layout("b@dp s@cp", mesh, b=four, s=np.int64(6))
    assert found == layout("b@dp s@cp", mesh, b=4, s=6)
    assert found.local_shape(0) == (2, 3) and all(type(size) is int for size in found.shape)
    with pytest.raises(LayoutError, match="is negative"):
        layout("b", mesh, b=np.int64(-1))
    with pytest.raises(LayoutError, match="is no integer"):
        layout("b", mesh, b=np.bool_(True))
