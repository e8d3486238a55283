"""Positions against the reference tables and against transformers' own functions."""

import copy

import numpy as np
import pytest
import torch
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from tests.positions import mrope_positions, patch_coords, position_corners
from tests.tables import CONFIG, RAW, ROWS
from vlshard.plan.header import SampleFacts, StepHeader

SIZES = [(2, 2), (4, 6), (2, 8), (6, 4), (12, 10), (14, 2), (26, 38)]


@pytest.fixture(scope="module")
def reference():
    with torch.device("meta"):
        return Qwen3VLMoeModel(Qwen3VLMoeConfig(**copy.deepcopy(RAW)))


def rope_index(reference, ids, grids):
    """What transformers says of one row without padding."""
    kinds = torch.tensor(np.select([ids == 100, ids == 101], [1, 2], 0))[None]
    runs = np.flatnonzero(np.diff(kinds[0].numpy(), prepend=0) > 0).tolist()
    split = {1: [], 2: []}
    for grid in grids:
        split[int(kinds[0, runs[0]])].append(grid)
        del runs[: grid[0]]
    grid_args = {
        "image_grid_thw": torch.tensor(split[1]) if split[1] else None,
        "video_grid_thw": torch.tensor(split[2]) if split[2] else None,
    }
    return reference.get_rope_index(torch.tensor(ids)[None], kinds, **grid_args)[0][:, 0].numpy()


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_tables(row):
    positions = mrope_positions(row.ids(CONFIG), row.grids, CONFIG)
    assert positions.dtype == np.int64
    assert np.array_equal(positions, row.positions)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_tables_are_those_of_transformers(row, reference):
    assert np.array_equal(rope_index(reference, row.ids(CONFIG), row.grids), row.positions)


def test_long_random_rows_equal_transformers(reference):
    draw = np.random.default_rng(0)
    for _ in range(20):
        ids, grids = draw.integers(0, 100, draw.integers(0, 3)).tolist(), []
        for _ in range(draw.integers(1, 6)):
            frames = int(draw.integers(1, 4)) if draw.random() < 0.5 else 1
            token = 101 if frames > 1 or draw.random() < 0.3 else 100
            h, w = (2 * draw.integers(1, 6, 2)).tolist()
            grids.append((frames, h, w))
            for _ in range(frames):
                ids += [7, 102, *[token] * (h * w // 4), 103]
        ids = np.array(ids + draw.integers(0, 100, draw.integers(0, 3)).tolist())
        before = copy.deepcopy(grids)
        positions = mrope_positions(ids, grids, CONFIG)
        assert np.array_equal(positions, rope_index(reference, ids, grids))
        assert grids == before


def test_rows_of_text_count_on():
    assert np.array_equal(mrope_positions(np.arange(5), [], CONFIG), np.tile(np.arange(5), (3, 1)))
    assert mrope_positions(np.arange(0), [], CONFIG).shape == (3, 0)


def test_a_row_may_end_in_placeholders():
    ids = np.array([1, 102, 100, 100])
    expected = [[0, 1, 2, 2], [0, 1, 2, 2], [0, 1, 2, 3]]
    assert mrope_positions(ids, [(1, 2, 4)], CONFIG).tolist() == expected


def test_patch_coords_are_in_merge_block_order():
    h = "0 0 1 1 0 0 1 1 0 0 1 1 2 2 3 3 2 2 3 3 2 2 3 3"
    w = "0 1 0 1 2 3 2 3 4 5 4 5 0 1 0 1 2 3 2 3 4 5 4 5"
    expected = [[int(x) for x in axis.split()] for axis in (h, w)]
    assert patch_coords(4, 6, 2).T.tolist() == expected


@pytest.mark.parametrize(("h", "w"), SIZES)
def test_patch_coords_equal_transformers(h, w):
    grid = torch.tensor([[1, h, w]])
    assert np.array_equal(patch_coords(h, w, 2), get_vision_position_ids(grid, 2).numpy())


@pytest.mark.parametrize("side", [1, 6, 48])
@pytest.mark.parametrize(("h", "w"), SIZES)
def test_corners_equal_transformers_bit_for_bit(h, w, side):
    corners, weights = position_corners(h, w, side, 2)
    expected = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, h, w]]), side, align_corners=True, spatial_merge_size=2
    )
    assert np.array_equal(corners, expected[0].numpy())
    assert weights.dtype == np.float32
    assert np.array_equal(weights, expected[1].numpy())


def test_one_segment_a_frame():
    items = [(1, 4, 6), (3, 4, 4)]
    sample = SampleFacts(0, 40, 0, tuple(items), (0, 8, 16, 24))
    header = StepHeader((sample,), (0,), 0)
    assert header.segments == (24, 16, 16, 16)
    assert np.cumsum((0, *header.segments)).tolist() == [0, 24, 40, 56, 72]
    assert get_vision_cu_seqlens(torch.tensor(items)).tolist() == [0, 24, 40, 56, 72]
