"""The four settings of the vision half: what they mean, and what cannot be."""

import pytest

from plans.vision_parallel import vision_parallel
from vlshard import Mesh, PlanError, fsdp, gather, hybrid, replicate, ulysses


@pytest.mark.parametrize(
    ("settings", "world", "mesh", "storage", "patches", "mode"),
    [
        ({}, 4, Mesh(dp=4, cp=1), None, "(img@dp.home s) c", None),
        ({"dp_shard": 1}, 2, Mesh(dp=2, cp=1), replicate(), "(img@dp.home s) c", None),
        (
            {"dp_shard": 1, "cp": 2},
            4,
            Mesh(dp=2, cp=2),
            replicate(),
            "(img@dp.home s)@cp c",
            gather("cp"),
        ),
        (
            {"cp": 2, "ulysses_degree": 2, "async_cp": True},
            2,
            Mesh(dp=1, cp=2),
            None,
            "(img@dp.home s)@cp c",
            ulysses("cp", overlap=True),
        ),
        (
            {"dp_shard": 8, "cp": 4, "ulysses_degree": 2},
            8,
            Mesh(dp=2, cp=(2, 2)),
            fsdp("dp cp.0 cp.1"),
            "(img@dp.home s)@cp c",
            hybrid(ulysses="cp.1", gather="cp.0"),
        ),
        (
            {"dp_shard": 2, "cp": 8, "ulysses_degree": 4},
            8,
            Mesh(dp=1, cp=(2, 2, 2)),
            fsdp("cp.2"),
            "(img@dp.home s)@cp c",
            hybrid(ulysses="cp.1 cp.2", gather="cp.0"),
        ),
        (
            {"dp_shard": 4, "cp": 2},
            16,
            Mesh(dp=(4, 2), cp=2),
            fsdp("dp.1 cp"),
            "(img@dp.home s)@cp c",
            gather("cp"),
        ),
    ],
)
def test_settings_give_the_vision_half(settings, world, mesh, storage, patches, mode):
    vision = vision_parallel(**settings)
    assert vision.mesh(world) == mesh
    assert vision.params(world) == ({} if storage is None else {"model.visual.**": storage})
    assert vision.layouts == {"vision.patches": patches}
    assert vision.attention == ({} if mode is None else {"vision": mode})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cp": 0}, "vision_parallel: cp=0 is no integer of at least 1"),
        (
            {"ulysses_degree": 2},
            "vision_parallel: ulysses_degree=2 is no number that divides cp=1\n"
            "  fix: ulysses_degree 1 works",
        ),
        (
            {"cp": 4, "ulysses_degree": 3},
            "vision_parallel: ulysses_degree=3 is no number that divides cp=4\n"
            "  fix: ulysses_degree 1, 2, 4 work",
        ),
        (
            {"async_cp": True},
            "vision_parallel: async_cp=True has nothing to overlap at cp=1\n"
            "  fix: async_cp=False, or cp of at least 2",
        ),
        (
            {"cp": 6, "ulysses_degree": 2, "dp_shard": 3},
            "vision_parallel: dp_shard=3 is no number that nests with cp=6 and ulysses_degree=2 "
            "(one divides the next)\n"
            "  fix: dp_shard 1, 2, 6 work, and multiples of 6",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(PlanError) as error:
        vision_parallel(**settings)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"cp": 4},
            "vision_parallel: cp=4 is no number that divides 6 ranks\n  fix: cp 1, 2, 3, 6 work",
        ),
        (
            {"dp_shard": 4},
            "vision_parallel: dp_shard=4 is no number that divides 6 ranks\n"
            "  fix: dp_shard 1, 2, 3, 6 work",
        ),
        (
            {"dp_shard": 4, "cp": 2},
            "vision_parallel: dp_shard=4 is no number that divides 6 ranks\n"
            "  fix: dp_shard 1, 2, 6 work",
        ),
        (
            {"cp": 4, "ulysses_degree": 2, "async_cp": True},
            "vision_parallel: cp=4 is no number that divides 6 ranks\n  fix: cp 2, 6 work",
        ),
    ],
)
def test_settings_that_do_not_fit_the_world_are_refused(settings, message):
    with pytest.raises(PlanError) as error:
        vision_parallel(**settings).mesh(6)
    assert str(error.value) == message
