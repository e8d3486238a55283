"""What a rank is told to send and to receive, against what its peers are told."""

import pytest

from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.programs.routes import route
from vlshard.programs.steps import Exchange
from vlshard.programs.transition import transition


@pytest.mark.parametrize(
    ("src", "dst", "sizes"),
    [
        ("(smp s)@tp.0@tp.1 m", "(smp s) m", {"smp": Packing([3, 4, 2])}),
        ("(smp s@tp.0)@tp.1 m", "(smp s) m", {"smp": Packing([3, 4, 2])}),
        ("s@tp.0.zigzag@tp.1 m", "s@tp m", {"s": 9}),
    ],
)
def test_an_exchange_over_all_parts_of_an_axis_brings_every_row(src, dst, sizes):
    mesh, sizes = MeshShape(tp=(2, 2)), {**sizes, "m": 1}
    program = transition(src, dst, mesh)
    assert [type(step) for step in program.steps] == [Exchange]
    before, after = program.layouts(mesh, **sizes)
    ways = [route(program.steps[0], before, after, rank) for rank in range(4)]
    for me, way in enumerate(ways):
        wanted = after.indices(me)[0]
        places = [i for rows in way.moves.receive.values() for i in rows]
        assert sorted(places) == [*range(len(wanted))]
        for peer, put in way.moves.receive.items():
            sent = before.indices(peer)[0][ways[peer].moves.send[me]]
            assert sent.tolist() == wanted[put].tolist()
