import pytest

from vlshard.errors import LayoutError, SpecError
from vlshard.mesh_shape import MeshShape
from vlshard.packing import Packing
from vlshard.spec import arrow
from vlshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Slice,
    ZeroPad,
    dual,
)
from vlshard.transition import Traffic, transition

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
        ("(img@dp.home s)@cp c", "(img@dp.home s@cp) c", (Exchange(("dp", "cp"), PACK),)),
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


def test_a_fused_dim_is_not_exchanged_once_its_sizes_are_known():
    sides = "(h@dp d)@cp m", "(h d)@cp m"
    assert transition(*sides, MESH).steps == (Exchange(("dp", "cp"), "(h d)"),)
    with pytest.raises(LayoutError, match="several steps"):
        transition(*sides, MESH, h=8, d=4)


@pytest.mark.parametrize(
    ("src", "dst", "carets"),
    [
        ("a@dp b@cp", "a b", "^^^^ ^^^^    ^ ^"),
        ("a@dp@cp", "a@cp", "^^^^^^^    ^^^^"),
        ("a@dp b@cp", "a@cp b@dp", "^^^^ ^^^^    ^^^^ ^^^^"),
        ("a b + dp cp", "a b", "      ^^ ^^"),
        ("a b@cp + dp", "a b", "  ^^^^   ^^      ^"),
    ],
)
def test_transition_points_at_what_needs_several_steps(src, dst, carets):
    with pytest.raises(LayoutError) as error:
        transition(src, dst, MESH, where="plans/long.py:41 text.q")
    headline, text, marks, note = str(error.value).split("\n")
    lead = "  plans/long.py:41 text.q: "
    assert headline == "this needs several steps, which is not available yet"
    assert (text, marks) == (f"{lead}{src} -> {dst}", " " * len(lead) + carets)
    assert note == "  one step gathers, slices, sums, moves one split or exchanges rows of one dim"


def test_transition_points_at_an_unknown_axis_in_the_arrow():
    with pytest.raises(LayoutError) as error:
        transition("t@cp", "t@xp", MESH)
    assert str(error.value) == (
        "unknown mesh axis 'xp'\n"
        "  t@cp -> t@xp\n"
        "            ^^\n"
        "  mesh: dp=2 cp=4; did you mean 'cp' or 'dp'?"
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


def test_program_prints():
    program = transition("(img@dp.home s)@cp h d", "(img@dp.home s) h@cp d", MESH)
    pack = Packing([8, 4, 4], 4, [0, 1, 1])
    assert program.describe(img=pack, h=8, d=2) == (
        "(img@dp.home s)@cp h d -> (img@dp.home s) h@cp d  on dp=2 cp=4\n"
        "  AllToAll (img s) -> h over cp; backward AllToAll h -> (img s) over cp\n"
        "  a rank sends at most 192 bytes, in backward 128"
    )
    assert str(transition("t@cp", "t@cp", MESH)) == ("t@cp -> t@cp  on dp=2 cp=4\n  nothing to do")


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
