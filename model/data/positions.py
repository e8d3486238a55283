"""Where tokens and patches are: positions on the host, from ids and grids alone."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int64
from numpy import ndarray

from vlshard.language import IntArray


def positions_of_runs(
    tokens: int, starts: Sequence[int] | IntArray, frames: Sequence[tuple[int, int]], *, merge: int
) -> Int64[ndarray, "3 tokens"]:
    """Positions of a row's tokens in time, height and width, from its placeholder runs.

    A run that starts at position p has time p, height p + row and width p + column; the token
    behind it has p + the larger of rows and columns.

    Args:
      tokens: length of the row.
      starts: token offset of each run.
      frames: (rows, columns) of each run's frame [patches before merging].
      merge: side of a merge unit [patches].
    """
    starts = np.asarray(starts, dtype=np.int64)
    rows, columns = np.asarray(frames, dtype=np.int64).reshape(-1, 2).T // merge
    lengths = rows * columns
    shifts = np.zeros(tokens + 1, dtype=np.int64)
    shifts[starts + lengths] = np.maximum(rows, columns) - lengths
    positions = np.tile(np.arange(tokens) + np.cumsum(shifts)[:tokens], (3, 1))
    run = np.repeat(np.arange(len(starts)), lengths)
    inside = np.arange(len(run)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = starts[run] + inside
    first = positions[0, starts][run]
    row, column = np.divmod(inside, columns[run])
    positions[:, at] = first, first + row, first + column
    return positions


def coords_of_patches(
    within: Int64[ndarray, " n"], columns: Int64[ndarray, " n"] | int, *, merge: int
) -> Int64[ndarray, "n 2"]:
    """(row, column) of patches, given in merge-block order.

    Args:
      within: number of each patch inside its frame.
      columns: columns of its frame [patches].
      merge: side of a merge unit [patches].
    Source: transformers 5.24, get_vision_position_ids.
    """
    unit, patch = np.divmod(within, merge * merge)
    block_row, block_column = np.divmod(unit, columns // merge)
    row, column = np.divmod(patch, merge)
    return np.stack([block_row * merge + row, block_column * merge + column], axis=-1)


def corners_of_patches(
    coords: Int64[ndarray, "n 2"], sizes: Int64[ndarray, "n 2"], *, side: int
) -> tuple[Int64[ndarray, "n 4"], Float32[ndarray, "n 4"]]:
    """How the square table of learned positions is interpolated at patches.

    The table's corners lie on the frame's corners, and values between are bilinear.

    Args:
      coords: (row, column) of each patch.
      sizes: (rows, columns) of its frame [patches].
      side: side of the table.
    Returns: the four nearest rows of the table and their weights; the products and their order
      are those of transformers, so the weights are equal bit for bit.
    Source: transformers 5.24, get_vision_interpolation_indices_and_weights.
    """
    spans = np.maximum(sizes - 1, 1).astype(np.float32)
    at = coords.astype(np.float32) * np.float32(side - 1) / spans
    low = np.floor(at)
    taps = np.minimum(low.astype(np.int64)[..., None] + np.arange(2), side - 1)
    distances = np.abs(at[..., None] - low[..., None] - np.arange(2, dtype=np.float32))
    weights = np.maximum(np.float32(1) - distances, np.float32(0))
    corners = taps[:, 0, :, None] * side + taps[:, 1, None, :]
    products = weights[:, 0, :, None] * weights[:, 1, None, :]
    return corners.reshape(-1, 4), products.reshape(-1, 4)
