"""Predicted times of the patch layouts, against arithmetic by hand."""

import pytest

from tests.tiny import tiny_config
from vlshard import MeshShape, PlanError, advise_patches
from vlshard.attention.modes import gather, ring, ulysses

MESH = MeshShape(dp=1, cp=2)
# The tiny vision tower: 2 heads of 16, width 32, MLP 44; a block multiplies (64 n + 6912) n times.
A, B = 2.0 * 32, 4.0 * 32 * 32 + 2.0 * 32 * 44
FAST = {"bandwidth": 1e9, "flops": 1e9, "itemsize": 4}


def found(lengths, mesh=MESH, **changes):
    advice = advise_patches(lengths, mesh, tiny_config(), **{**FAST, **changes})
    return {(entry.patches, entry.mode): entry for entry in advice}


def test_the_cost_is_the_tiny_towers():
    assert tiny_config().patch_cost == (A, B)
    assert tiny_config().heads["vision"] == (2, 2, 16)


def test_two_equal_images_need_no_cut():
    entries = found([64, 64])
    alone = (A * 64 + B) * 64 * 6 / 1e9
    dealt = entries["(img@dp.home@cp.balance s) c", None]
    assert (dealt.compute, dealt.sent, dealt.imbalance) == (pytest.approx(alone), 0, 1.0)
    copied = entries["(img@dp.home s) c", None]
    assert copied.compute == pytest.approx(2 * alone)
    # The pack is cut between the images, so nobody needs what the other has.
    assert entries["(img@dp.home s)@cp c", gather("cp")].sent == 0
    assert entries["(img@dp.home s)@cp c", ring("cp")].sent == 0


def test_one_image_is_best_cut():
    entries = found([128])
    half = (A * 128 + B) * 64 * 6 / 1e9
    fetched = entries["(img@dp.home s)@cp c", gather("cp")]
    assert fetched.compute == pytest.approx(half)
    # k and v of 64 rows of 32 go to the other rank, and gradients of the other's come home.
    assert fetched.sent == 4 * (2 * 64 * 32) * 2
    assert entries["(img@dp.home s)@cp c", ring("cp")].sent == 4 * (2 * 64 * 32) * 3
    short = found([128], itemsize=2)["(img@dp.home s)@cp c", ring("cp")]
    assert short.sent == (2 * 2 + 4) * (2 * 64 * 32)  # sums of gradients stay in fp32
    # q, k, v and out: half of 64 rows of 32 each, and the same back.
    assert entries["(img@dp.home s)@cp c", ulysses("cp")].sent == 4 * (4 * 64 * 16) * 2
    assert fetched.seconds == pytest.approx(half + fetched.sent / 1e9)
    assert entries["(img@(dp cp).balance s) c", None].imbalance == 2.0


def test_the_fastest_comes_first_and_says_why():
    advice = advise_patches([128], MESH, tiny_config(), **FAST)
    assert [entry.seconds for entry in advice] == sorted(entry.seconds for entry in advice)
    assert advice[0].mode == gather("cp") or advice[0].mode == ulysses("cp")
    slow = advise_patches([128], MESH, tiny_config(), **{**FAST, "bandwidth": 1.0})
    assert slow[0].mode is None
    assert slow[0].why == "compute 11.6 ms, the busiest rank 2.00 times the mean; nothing is sent"


def test_what_cannot_be_is_refused():
    with pytest.raises(PlanError, match=r"bandwidth=0\.0 is not above 0"):
        found([64], bandwidth=0.0)
    with pytest.raises(PlanError, match="advice needs axes dp and cp; the mesh is dp="):
        found([64], MeshShape(dp=2))
