import pytest

from vlshard.language.errors import LayoutError, SpecError
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.language.spec import arrow
from vlshard.programs.program import Traffic
from vlshard.programs.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Slice,
    ZeroPad,
    dual,
)
from vlshard.programs.transition import transition

MESH = MeshShape(dp=2, cp=4)
PACK = "(img s)"


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ("t@cp h d", "t h@cp d", (AllToAll("cp", src="t", dst="h"),)),
        ("t@cp h d", "t h d", (AllGather("cp", dim="t"),)),
        ("t h d", "t@cp h d", (Slice("cp", dim="t"),)),
        ("t d + cp", "t@cp d", (ReduceScatter("cp", dim="t"),)),
        ("t d + cp", "t d", (AllReduce("cp"),)),
        ("t d + cp dp", "t d + cp", (AllReduce("dp"),)),
        ("t@cp d + dp", "t d + dp", (AllGather("cp", "t"),)),
        ("t@cp.zigzag d", "t@cp d", (Exchange(("cp",), dim="t"),)),
        ("t@cp@dp d", "t@dp@cp d", (Exchange(("dp", "cp"), dim="t"),)),
        ("t@dp@cp h", "t@dp h@cp", (AllToAll("cp", src="t", dst="h"),)),
        ("t@dp@cp h", "t@dp h", (AllGather("cp", dim="t"),)),
        ("(h@cp d) m", "(h d) m", (AllGather("cp", dim="(h d)"),)),
        ("t@cp ... ", "t@cp ...", ()),
        ("t d + cp dp", "t d + dp cp", ()),
        ("b@dp.home s@cp.zigzag h d", "b@dp.home s h@cp d", (AllToAll("cp", "s", "h"),)),
        ("(img@dp.home s)@cp h d", "(img@dp.home s) h@cp d", (AllToAll("cp", PACK, "h"),)),
        ("(img@dp.home s@cp) h d", "(img@dp.home s) h@cp d", (AllToAll("cp", PACK, "h"),)),
        ("(img@dp.home@cp s) h d", "(img@dp.home s) h@cp d", (AllToAll("cp", PACK, "h"),)),
        ("(img@dp.home s) h@cp d", "(img@dp.home s)@cp h d", (AllToAll("cp", "h", PACK),)),
        ("(img@dp.home s)@cp c", "(img@dp.home s) c", (AllGather("cp", PACK),)),
        ("(img@dp.home s)@cp c", "(img s)@cp c", (Exchange(("dp", "cp"), PACK),)),
        ("(img@dp.home s)@cp c", "(img@dp.home s@cp) c", (Exchange(("cp",), PACK),)),
        ("(img s) c + cp", "(img@cp s) c", (ReduceScatter("cp", PACK),)),
    ],
)
def test_transition_emits_the_step(src, dst, steps):
    assert transition(src, dst, MESH).steps == steps


@pytest.mark.parametrize(
    ("src", "dst"),
    [("t@one h", "t h@one"), ("t h + one", "t h"), ("t@one.zigzag h", "t h"), ("t@one@cp", "t@cp")],
)
def test_axes_of_size_one_cost_nothing(src, dst):
    assert transition(src, dst, MeshShape(one=1, cp=4)).steps == ()


def test_transition_takes_the_sides_of_an_arrow():
    assert transition(*arrow("t@cp -> t"), MESH) == transition("t@cp", "t", MESH)


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        # Each moves once, the one that is in the way first: 3/32 + 1/16 of the tensor.
        ("b@dp s@cp h", "b s@dp h@cp", (AllToAll("cp", "s", "h"), AllToAll("dp", "b", "s"))),
        # The smaller gather first: 3/8 + 1/2; the other way round it is 1/8 + 3/4, as much.
        ("a@dp b@cp", "a b", (AllGather("dp", "a"), AllGather("cp", "b"))),
        # The sum of half of b, and all gathered at once: 1/8 + 7/8, as much as 1/4 + 3/4.
        ("a b@cp + dp", "a b", (ReduceScatter("dp", "b"), AllGather("(cp dp)", "b"))),
        # Both in one: 2 * 7/8 is less than 2 * (1/2 + 3/4).
        ("a b + dp cp", "a b", (AllReduce("(dp cp)"),)),
        ("a b + dp cp", "a@dp b + cp", (ReduceScatter("dp", "a"),)),
        ("a b + dp cp", "a@dp@cp b", (ReduceScatter("(dp cp)", "a"),)),
        ("a b + dp cp", "a@(dp cp) b", (ReduceScatter("(dp cp)", "a"),)),
        ("a@(dp cp) b", "a b@(dp cp)", (AllToAll("(dp cp)", "a", "b"),)),
        ("a@(dp cp) b", "a b", (AllGather("(dp cp)", "a"),)),
        # Cut first by both: 7/64 + 1/16 of the tensor; the first alone would send 3/16.
        (
            "a@cp b",
            "a@dp b@cp",
            (Slice("dp", "a"), AllToAll("(cp dp)", "a", "b"), AllToAll("dp", "b", "a")),
        ),
        # Cut first, so that less is sent: on another dim, since its place is taken.
        ("a@cp b c", "a b@cp c@dp", (Slice("dp", "c"), AllToAll("cp", "a", "b"))),
    ],
)
def test_transition_finds_the_cheapest_steps(src, dst, steps):
    assert transition(src, dst, MESH).steps == steps


def test_transition_keeps_the_layouts_between():
    program = transition("b@dp s@cp h d", "b s@dp h@cp d", MESH)
    assert list(map(str, program.between)) == ["b@dp s h@cp d"]
    assert list(map(str, program.specs)) == ["b@dp s@cp h d", "b@dp s h@cp d", "b s@dp h@cp d"]


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ("s@cp h", "s@cp.0 h@cp.1", (Exchange(("cp",), "s"), AllToAll("cp.1", "s", "h"))),
        ("s@cp.0@cp.1 h", "s@cp.0 h@cp.1", (AllToAll("cp.1", "s", "h"),)),
        ("s@cp h", "s h", (AllGather("cp", "s"),)),
        ("s h + cp.0 cp.1", "s h + cp.1", (AllReduce("cp.0"),)),
        ("s h + cp tp", "s@(tp cp) h", (ReduceScatter("(tp cp)", "s"),)),
    ],
)
def test_axes_in_parts(src, dst, steps):
    assert transition(src, dst, MeshShape(cp=(2, 4), tp=2)).steps == steps


def test_a_bracket_is_fused_once_its_size_is_known():
    sides = "(h@dp d@cp) m", "(h d@cp) m"
    assert transition(*sides, MESH).steps == (Exchange(("dp", "cp"), "(h d)"),)
    assert transition(*sides, MESH, h=8, d=4).steps == (AllGather("dp", "(h d)"),)
    assert transition("(3 h@dp d) m", "(3 h d) m", MESH).steps == (AllGather("dp", "(3 h d)"),)


def test_the_packing_decides_where_segments_are_dealt():
    sides = "(img@cp.balance s) c", "(img@cp s) c"
    even, odd = Packing([4] * 8), Packing([40, 4, 4, 4])
    sent = [
        transition(*sides, MESH, img=pack).bytes_sent(img=pack, c=1, rank=1) for pack in (even, odd)
    ]
    assert sent == [Traffic(32, 32), Traffic(0, 0)]


def test_transition_points_at_an_unknown_axis_in_the_arrow():
    with pytest.raises(LayoutError) as error:
        transition("t@cp", "t@xp", MESH)
    assert str(error.value) == (
        "unknown mesh axis 'xp'\n"
        "  t@cp -> t@xp\n"
        "            ^^\n"
        "  mesh: dp=2 cp=4; did you mean 'cp' or 'dp'?"
    )


def test_transition_points_at_a_packing_that_does_not_fit():
    with pytest.raises(LayoutError) as error:
        transition("(img@cp s) c", "(img@dp.home s) c", MESH, img=Packing([4, 4]), where="a.py:7")
    assert str(error.value) == (
        "'.home' needs to know who holds each segment of 'img'\n"
        "  a.py:7: (img@cp s) c -> (img@dp.home s) c\n"
        "                                  ^^^^\n"
        "  give img=Packing(lengths, home=[...])"
    )


@pytest.mark.parametrize(
    ("src", "dst", "match"),
    [
        ("t", "t + cp", "a sum over cp is pending on the right but not on the left"),
        ("a b", "b a", "the dims of both sides must be the same, in the same order"),
        ("a b", "a c", "the dims of both sides must be the same, in the same order"),
    ],
)
def test_transition_refuses_what_is_no_arrow(src, dst, match):
    with pytest.raises(SpecError, match=match):
        transition(src, dst, MESH)


@pytest.mark.parametrize(
    ("src", "dst", "sizes", "sent"),
    [
        # t has blocks of 3, 3, 3, 1; h blocks of 2: rank 2 (dp 0, cp 2) keeps 3x2 of its 3x8
        ("t@cp h d", "t h@cp d", {"t": 10, "h": 8, "d": 5}, (4 * 90, 4 * 70)),
        ("t@cp h", "t h", {"t": 10, "h": 3}, (4 * 27, 4 * 21)),  # 3 rows to each of 3; 7 back
        ("t h", "t@cp h", {"t": 10, "h": 3}, (0, 0)),
        ("t h + cp", "t@cp h", {"t": 10, "h": 3}, (4 * 21, 4 * 27)),
        ("t h + cp", "t h", {"t": 8, "h": 3}, (4 * 36, 4 * 36)),  # 2 * 3/4 of 24
        # zigzag rank 2 holds 2 and 5 of 8, contiguous it wants 4 and 5
        ("t@cp.zigzag h", "t@cp h", {"t": 8, "h": 3}, (4 * 3, 4 * 3)),
    ],
)
def test_bytes_sent_are_exact(src, dst, sizes, sent):
    assert transition(src, dst, MESH).bytes_sent(rank=2, **sizes) == Traffic(*sent)


def test_gather_of_a_pack_sends_no_more_than_an_exchange():
    pack = {"img": Packing([8] * 4, 4, [0, 0, 1, 1]), "c": 3}
    gather = transition("(img@dp.home s)@cp c", "(img@dp.home s) c", MESH).bytes_sent(**pack)
    reordered = transition("(img@dp.home s)@cp c", "(img@dp.home@cp s) c", MESH)
    assert gather == Traffic(4 * 3 * 4 * 3, 4 * 3 * 12)  # 4 of 16 rows to each of 3; 12 back
    # the 4 units lie one a rank; ranks 0 and 1 want both halves of a segment: rank 0 keeps its own
    assert [reordered.bytes_sent(rank=r, **pack).forward for r in range(4)] == [0, 48, 48, 48]


def test_program_prints_its_steps():
    assert str(transition("t@cp", "t@cp", MESH)) == "t@cp -> t@cp  on dp=2 cp=4\n  nothing to do"
    assert str(transition("t@cp h", "t h@cp", MESH)) == (
        "t@cp h -> t h@cp  on dp=2 cp=4\n"
        "  AllToAll t -> h over cp  backward AllToAll h -> t over cp"
    )
    assert str(transition("b@dp s@cp h", "b s@dp h@cp", MESH)) == (
        "b@dp s@cp h -> b s@dp h@cp  on dp=2 cp=4\n"
        "  AllToAll s -> h over cp  -> b@dp s h@cp  backward AllToAll h -> s over cp\n"
        "  AllToAll b -> s over dp  -> b s@dp h@cp  backward AllToAll s -> b over dp"
    )


def test_program_prints_what_it_sends():
    program = transition("b@dp s@cp h", "b s@dp h@cp", MESH)
    assert program.describe(b=8, s=64, h=8) == (
        "b@dp s@cp h -> b s@dp h@cp  on dp=2 cp=4\n"
        "  forward                  layout       bytes  backward                 bytes\n"
        "  AllToAll s -> h over cp  b@dp s h@cp  1,536  AllToAll h -> s over cp  1,536\n"
        "  AllToAll b -> s over dp  b s@dp h@cp  1,024  AllToAll s -> b over dp  1,024\n"
        "  a rank sends at most 2,560 bytes in all, in backward 2,560; no program less than 1,792"
    )


@pytest.mark.parametrize(
    ("step", "backward"),
    [
        (AllGather("cp", "t"), ReduceScatter("cp", "t")),
        (AllToAll("cp", "t", "h"), AllToAll("cp", "h", "t")),
        (Slice("cp", "t"), ZeroPad("cp", "t")),
        (AllReduce("cp"), AllReduce("cp")),
        (Exchange(("dp", "cp"), "t"), Exchange(("dp", "cp"), "t")),
    ],
)
def test_each_step_has_its_dual(step, backward):
    assert (dual(step), dual(backward)) == (backward, step)


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ("s + cp", "s + cp.0", (AllReduce("cp.1"),)),
        ("s + cp", "s@cp.0 + cp.1", (ReduceScatter("cp.0", "s"),)),
    ],
)
def test_sums_over_parts_of_an_axis(src, dst, steps):
    assert transition(src, dst, MeshShape(cp=(2, 2))).steps == steps


@pytest.mark.parametrize(("pending", "carets"), [("cp", "^^"), ("cp.1", "^^^^")])
def test_no_sum_begins_on_the_way(pending, carets):
    with pytest.raises(LayoutError) as error:
        transition("s + cp.0", f"s + {pending}", MeshShape(cp=(2, 2)))
    assert str(error.value) == (
        f"a sum over {pending} is pending on the right but not on the left\n"
        f"  s + cp.0 -> s + {pending}\n"
        f"                  {carets}\n"
        "  a sum can be carried out on the way, but not begun"
    )
