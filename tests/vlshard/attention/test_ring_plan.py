"""Who needs whose block in a ring, and which rows see each other, beside brute force."""

import numpy as np
import pytest

from vlshard.attention.ring_plan import plan_ring
from vlshard.attention.segments import seen_rows, segment_runs

SEGMENTS = [6, 2, 4]
HELD = {
    "contiguous": [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
    "head and tail": [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7], []],
    "whole segments": [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], []],
    "each segment cut": [[0, 1, 6, 8], [2, 3, 7, 9], [4, 10], [5, 11]],
}
# How far each block travels: to the last member after it, around the ring, that sees a key of it.
REACH = {
    ("contiguous", False): [1, 3, 1, 3],
    ("contiguous", True): [1, 0, 1, 0],
    ("head and tail", False): [2, 3, 3, 0],
    ("head and tail", True): [2, 3, 0, 0],
    ("whole segments", False): [0, 0, 0, 0],
    ("each segment cut", True): [3, 2, 1, 0],
}


def sees(row, key, causal):
    """Whether a row sees a key, by going through the segments."""
    start = 0
    for length in SEGMENTS:
        if start <= row < start + length:
            return start <= key < start + length and (key <= row or not causal)
        start += length
    raise AssertionError(row)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_pairs_are_exactly_the_rows_that_see_each_other(name, causal):
    held = [np.array(rows, dtype=np.int64) for rows in HELD[name]]
    for me, queries in enumerate(held):
        found = []
        plan = plan_ring(held, SEGMENTS, causal, me)
        for step, pairs in enumerate(plan.pairs):
            keys = held[plan.owner(step)]
            for pair in pairs:
                for q, k in zip(pair.q.starts, pair.k.starts, strict=True):
                    for i in range(pair.q.length):
                        seen = i + 1 if pair.causal else pair.k.length
                        found += [(int(queries[q + i]), int(keys[k + j])) for j in range(seen)]
                assert len(set(pair.q.rows.tolist())) == pair.q.rows.size
                assert plan.arrives(step)
        expected = [(q, k) for q in queries for k in range(12) if sees(q, k, causal)]
        assert sorted(found) == expected


@pytest.mark.parametrize(("name", "causal"), REACH)
def test_blocks_travel_no_further_than_they_are_needed(name, causal):
    held = [np.array(rows, dtype=np.int64) for rows in HELD[name]]
    assert list(plan_ring(held, SEGMENTS, causal, 0).reach) == REACH[name, causal]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [[], [3], [1, 2, 9], [0, 1, 2, 3, 4, 5, 7, 11]])
def test_runs_over_the_seen_rows(rows, causal):
    queries = np.array(rows, dtype=np.int64)
    keys = seen_rows(queries, SEGMENTS, causal)
    assert keys.tolist() == [k for k in range(12) if any(sees(q, k, causal) for q in rows)]
    runs = segment_runs(queries, keys, SEGMENTS, causal)
    found = []
    table = zip(runs.q_starts, runs.q_lengths, runs.k_starts, runs.k_lengths, strict=True)
    for q, nq, k, nk in table:
        for i in range(nq):
            seen = i + 1 + nk - nq if causal else nk
            found += [(rows[q + i], int(keys[k + j])) for j in range(seen)]
    assert found == [(q, k) for q in rows for k in range(12) if sees(q, k, causal)]
