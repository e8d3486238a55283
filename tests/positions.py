"""Positions of a whole row and of a whole frame, which training asks for in parts."""

from collections.abc import Sequence

import numpy as np

from model.config.config import Config
from model.data.positions import coords_of_patches, corners_of_patches, positions_of_runs
from model.data.sample import placeholder_runs
from vlshard.language import IntArray
from vlshard.plan import Grid


def mrope_positions(ids: IntArray, grids: Sequence[Grid], config: Config) -> IntArray:
    """Positions of a row's tokens in time, height and width, [3, tokens]."""
    starts = placeholder_runs(ids, config).starts
    frames = [(h, w) for t, h, w in grids for _ in range(t)]
    return positions_of_runs(len(ids), starts, frames, merge=config.vision.spatial_merge_size)


def patch_coords(h: int, w: int, merge: int) -> IntArray:
    """(row, column) of every patch of a frame of h x w patches, in merge-block order."""
    return coords_of_patches(np.arange(h * w), w, merge=merge)


def position_corners(h: int, w: int, side: int, merge: int) -> tuple[IntArray, np.ndarray]:
    """Corners and weights of every patch of a frame of h x w patches, in merge-block order."""
    sizes = np.tile(np.array([h, w]), (h * w, 1))
    return corners_of_patches(patch_coords(h, w, merge), sizes, side=side)
