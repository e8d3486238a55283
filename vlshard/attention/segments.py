"""Which rows see each other: rows of one segment, and of these, if causal, those up to each row.

Rows are global indices of segments that lie one after another; integers on the host only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vlshard.attention.runs import Runs
from vlshard.language import IntArray, ranges


class Stretches(NamedTuple):
    """Rows cut where they stop being consecutive or change segment.

    Attributes:
      starts: local index of each stretch's first row.
      lengths: rows of each.
      rows: global index of each stretch's first row.
      segments: the segment of each.
    """

    starts: IntArray
    lengths: IntArray
    rows: IntArray
    segments: IntArray


def stretches(rows: IntArray, segments: Sequence[int] | IntArray) -> Stretches:
    """Cut rows into stretches.

    Args:
      rows: global rows in local order.
      segments: length of each segment.
    """
    segment = segment_of(rows, segments)
    edges = (np.diff(segment) != 0) | (np.diff(rows) != 1)
    starts = np.flatnonzero(np.concatenate([np.ones(min(rows.size, 1), dtype=bool), edges]))
    lengths = np.diff(np.concatenate([starts, [rows.size]]))
    return Stretches(starts, lengths, rows[starts], segment[starts])


def segment_of(rows: IntArray, segments: Sequence[int] | IntArray) -> IntArray:
    """The segment that each row belongs to."""
    return np.searchsorted(np.cumsum(segments, dtype=np.int64), rows, side="right")


def seen_rows(rows: IntArray, segments: Sequence[int] | IntArray, causal: bool) -> IntArray:
    """All rows that some of the given rows see, increasing.

    Args:
      rows: global rows.
      segments: length of each segment.
      causal: rows see only what comes before them in their segment, and themselves.
    """
    lengths = np.asarray(segments, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    seen = np.zeros(lengths.size, dtype=np.int64)
    segment = segment_of(rows, segments)
    reach = rows + 1 - starts[segment] if causal else lengths[segment]
    np.maximum.at(seen, segment, reach)
    return ranges(starts, seen)


def segment_runs(
    rows: IntArray, keys: IntArray, segments: Sequence[int] | IntArray, causal: bool
) -> Runs:
    """Which of the keys at hand the queries see.

    Args:
      rows: global rows of the queries, in local order.
      keys: global rows of the keys, increasing; all that the queries see are among them.
      segments: length of each segment.
      causal: queries see only what comes before them in their segment, and themselves.
    """
    q = stretches(rows, segments)
    lengths = np.asarray(segments, dtype=np.int64)
    first = (np.cumsum(lengths) - lengths)[q.segments]
    k_lengths = q.rows + q.lengths - first if causal else lengths[q.segments]
    k_starts = np.searchsorted(keys, first)
    table = np.stack([q.starts, q.lengths, k_starts, k_lengths]).tolist()
    return Runs(*map(tuple, table), causal=causal)
