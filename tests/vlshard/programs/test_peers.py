"""Moves planned from who holds a rank's own rows are those planned from what everybody holds."""

import numpy as np
import pytest

from tests.dense_moves import dense_moves
from vlshard import MeshShape, Packing, layout, spec
from vlshard.language import LayoutError, PlanError, spec_axes
from vlshard.programs import Peers, plan_moves

MESH = MeshShape(dp=2, cp=3, tp=2)
PACK = Packing([12, 4, 0, 8, 28, 4, 16, 40], unit=4, home=[0, 1, 1, 0, 1, 1, 0, 0], homes=2)
ROWS = Packing([1] * 23, home=[i * 7 % 5 % 2 for i in range(23)], homes=2)
SIDES = {
    "img": [
        "(img@dp.home s)@cp",
        "(img@dp.home s)",
        "(img@dp.home@cp.balance s@tp)",
        "(img@(dp cp).balance s)",
        "(img s@(cp tp).zigzag)@dp",
        "(img s)@(tp dp)",
    ],
    "b": ["b@dp.home@cp", "b@dp.home", "b@(cp tp)", "b@cp.zigzag@dp", "b"],
}
PAIRS = [(name, a, b) for name, texts in SIDES.items() for a in texts for b in texts]


def same(mine, other):
    return mine.keys() == other.keys() and all(np.array_equal(mine[k], other[k]) for k in mine)


@pytest.mark.parametrize(("name", "src", "dst"), PAIRS)
def test_moves_are_those_of_a_planner_that_lays_everybody_out(name, src, dst):
    before, after = (layout(t, MESH, **{name: PACK if name == "img" else ROWS}) for t in (src, dst))
    used = {*spec_axes(spec(src), MESH), *spec_axes(spec(dst), MESH)}
    axes = tuple(axis for axis in MESH.parts if axis in used)
    for rank in range(MESH.size):
        peers = Peers(MESH, axes, rank)
        members = MESH.peers(axes, rank)
        assert (peers.size, peers.me) == (len(members), members.index(rank))
        have, want = ([side.indices(peer)[0] for peer in members] for side in (before, after))
        found = plan_moves(
            have[peers.me],
            want[peers.me],
            (before.holders, after.holders),
            peers,
            local=False,
        )
        right = dense_moves(have, want, peers.me)
        assert same(found.send, right.send) and same(found.receive, right.receive)
        assert (found.rows, found.size) == (right.rows, right.size)
        assert (found.rows_sent, found.rows_received) == (right.rows_sent, right.rows_received)
        assert same(found.reverse.send, right.receive) and found.reverse.reverse.me == peers.me


def test_rows_that_no_member_holds_are_named():
    where = layout("(img@dp.home s)@cp", MESH, img=PACK)
    want = np.array([3, 11, 12, 15, 16])  # segment 0 is at home with dp 0, segment 1 with dp 1
    with pytest.raises(LayoutError) as error:
        plan_moves(
            where.indices(0)[0],
            want,
            (where.holders, where.holders),
            Peers(MESH, ("cp",), 0),
            local=False,
        )
    assert str(error.value) == "no rank of the group holds these wanted rows: 12, 15"


def test_peers_are_of_the_mesh():
    with pytest.raises(PlanError):
        _ = Peers(MESH, ("cp",), 12).me
