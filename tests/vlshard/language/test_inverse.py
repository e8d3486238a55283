"""Who holds a row is who says that it does: the inverse of ``indices``, for all rows at once."""

import numpy as np
import pytest

from vlshard import MeshShape, Packing, layout, spec

MESH = MeshShape(dp=(2, 3), cp=4, tp=2)
PACK = Packing([12, 4, 0, 8, 28, 4, 16, 40, 0], unit=4, home=[0, 1, 1, 2, 5, 5, 0, 3, 4], homes=6)
ROWS = Packing([1] * 23, home=[i * 7 % 6 for i in range(23)], homes=6)
SPECS = [
    "(img s)",
    "(img s)@cp",
    "(img@dp s)@cp",
    "(img s@cp)",
    "(img s@cp.zigzag)",
    "(img s@(dp.1 cp))",
    "(img s@cp.zigzag@tp)@dp.1",
    "(img@dp.home s)@cp",
    "(img@dp.0.home s@dp.1)@(cp tp)",
    "(img@dp.home@cp.balance s@tp.zigzag)",
    "(img@(dp cp).balance s)@tp",
    "(img@cp.balance@dp s)",
    "b@dp.home",
    "b@dp.0.home@cp",
    "b@cp@dp.home@tp.zigzag",
    "s@cp",
    "s@cp.zigzag@dp.zigzag",
    "s@(cp tp)@dp.1.zigzag",
    "(3 h@tp d@cp)@dp.1",
    "((h@cp g)@tp d)@dp",
]


@pytest.mark.parametrize("text", SPECS)
def test_holders_are_those_whose_indices_have_the_row(text):
    sizes = {"img": PACK, "b": ROWS, "s": 53, "h": 8, "g": 3, "d": 8}
    named = {name: sizes[name] for name in spec(text).names}
    where = layout(text, MESH, **({"img": PACK} if "img" in named else named))
    everything = np.arange(where.shape[0])
    order = np.random.default_rng(0).permutation(everything)
    found = where.holders(order)
    assert set(found) == set(where.bound[0].axes)
    for rank in range(MESH.size):
        place = MESH.coords(rank)
        same = np.ones(order.size, dtype=bool)
        for axis, at in found.items():
            same &= at == place[axis]
        rows = where.indices(rank)[0]
        assert (np.diff(rows) > 0).all()  # every rank holds its rows in global order
        assert np.array_equal(np.sort(order[same]), rows)


def test_no_row_no_holder():
    where = layout("(img@dp.home s)@cp", MESH, img=PACK)
    assert {axis: at.tolist() for axis, at in where.holders(np.arange(0)).items()} == {
        "dp.0": [],
        "dp.1": [],
        "cp": [],
    }
