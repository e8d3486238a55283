"""Who needs whose block of keys in a ring, and which of its rows: integers on the host."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vlshard.attention.ring_attention import Pair, RingPlan
from vlshard.attention.runs import Windows
from vlshard.attention.segments import segment_of, stretches
from vlshard.language import IntArray

Stretch = tuple[int, int, int]


def plan_ring(
    rows: Sequence[IntArray], segments: Sequence[int] | IntArray, causal: bool, me: int
) -> RingPlan:
    """One member's part in a ring, without its process group.

    Args:
      rows: global rows of each member, in local order; no row is with two of them.
      segments: length of each segment; rows see their own segment only.
      causal: rows see only what comes before them in their segment, and themselves.
      me: this member.
    """
    size = len(rows)
    needs = needed(rows, segments, causal)
    reach = [
        max((hop for hop in range(size) if needs[(owner + hop) % size, owner]), default=0)
        for owner in range(size)
    ]
    owners = [(me - step) % size for step in range(size)]
    return RingPlan(
        me=me,
        rows=tuple(held.size for held in rows),
        reach=tuple(reach),
        pairs=tuple(pair_up(rows[me], rows[owner], segments, causal) for owner in owners),
        group=None,
    )


def needed(
    rows: Sequence[IntArray], segments: Sequence[int] | IntArray, causal: bool
) -> NDArray[np.bool_]:
    """Whether the queries of each member (first index) see a key of each member (second)."""
    top = int(np.sum(segments))
    first = np.full((len(rows), len(segments)), top)
    last = np.full((len(rows), len(segments)), -1)
    for member, held in enumerate(rows):
        segment = segment_of(held, segments)
        np.minimum.at(first[member], segment, held)
        np.maximum.at(last[member], segment, held)
    both = (last[:, None] >= 0) & (last[None] >= 0)
    seen = both & (first[None] <= last[:, None]) if causal else both
    return np.any(seen, axis=-1)


def pair_up(
    queries: IntArray, keys: IntArray, segments: Sequence[int] | IntArray, causal: bool
) -> tuple[Pair, ...]:
    """The windows of queries and keys that see each other, equal shapes in one pair."""
    held: dict[int, list[Stretch]] = {}
    for start, length, row, segment in zip(*map(list, stretches(keys, segments)), strict=True):
        held.setdefault(int(segment), []).append((int(start), int(length), int(row)))
    groups: dict[tuple[int, int, bool, int], list[tuple[int, int]]] = {}
    for start, length, row, segment in zip(*map(list, stretches(queries, segments)), strict=True):
        found = seen_windows((int(row), int(length)), held.get(int(segment), []), causal)
        for turn, (k_start, k_length, square) in enumerate(found):
            shape = (int(length), k_length, square, turn)
            groups.setdefault(shape, []).append((int(start), k_start))
    pairs: list[Pair] = []
    for (nq, nk, square, _), starts in groups.items():
        q_starts, k_starts = np.array(starts, dtype=np.int64).T
        pairs.append(Pair(Windows(q_starts, nq), Windows(k_starts, nk), square))
    return tuple(pairs)


def seen_windows(
    query: tuple[int, int], keys: Sequence[Stretch], causal: bool
) -> list[tuple[int, int, bool]]:
    """The windows of keys of one segment that a stretch of its queries sees.

    Args:
      query: first global row and number of rows of the stretch.
      keys: local start, number of rows and first global row of each stretch of keys.
      causal: queries see only what comes before them, and themselves.
    Returns: local start, number of rows, and whether query i sees the first ``i + 1`` only.
    """
    row, length = query
    windows: list[tuple[int, int, bool]] = []
    for start, size, first in keys:
        if causal and first >= row + length:
            continue
        square = causal and first + size > row
        if square and (first, size) != query:
            raise AssertionError(f"queries {query} share rows with keys {(first, size)}")
        if windows and not square and not windows[-1][2] and sum(windows[-1][:2]) == start:
            windows[-1] = (windows[-1][0], windows[-1][1] + size, False)
        else:
            windows.append((start, size, square))
    return windows
