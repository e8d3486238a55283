"""Axes of a plan's mesh that nothing uses are remarked."""

import pytest

from vlshard import MeshShape, fsdp, replicate
from vlshard.plan import unused_axes

CP = "mesh axis cp=2: only parameters are cut over it, so its 2 ranks compute the same"
TP = "mesh axis tp=2: nothing is cut over it, so its 2 ranks compute the same"


@pytest.mark.parametrize(
    ("mesh", "params", "tokens", "remarks"),
    [
        ({"dp": 2, "cp": 2}, fsdp("dp cp"), "b@dp.home s@cp m", []),
        ({"dp": 2, "cp": 1, "tp": 1}, fsdp("dp"), "b@dp.home s m", []),
        ({"dp": 2, "cp": 1, "tp": 2}, replicate(), "b@dp.home s m", [TP]),
        (
            {"dp": 2, "cp": 2, "tp": 2},
            fsdp("dp cp"),
            "b@dp.home s m",
            [
                "mesh axis cp=2: only parameters are cut over it, so its 2 ranks compute the same",
                TP,
            ],
        ),
        (
            {"dp": 1, "cp": (2, 3)},
            replicate(),
            "b@dp.home s@cp.1 m",
            ["mesh axis cp.0=2: nothing is cut over it, so its 2 ranks compute the same"],
        ),
    ],
)
def test_axes_over_which_all_compute_the_same_are_remarked(mesh, params, tokens, remarks):
    layouts = {"vision.patches": "(img@dp.home s) c", "text.tokens": tokens}
    assert list(unused_axes(layouts, {"**": params}, MeshShape(**mesh))) == remarks
