"""Global sizes that local ones admit: by closed forms, beside all sizes tried one by one."""

import itertools
import tracemalloc

import pytest
from torch import Tensor, zeros

from vlshard import MeshShape, Sharded, use_mesh
from vlshard.language import Cut, Plain
from vlshard.typed.sizes import Claim, find_size

TRIED = 400


def claim(cuts, places, rows, times=1):
    names = "xy"[: len(cuts)]
    bound = tuple(Cut((a,), (n,), order) for a, (n, order) in zip(names, cuts, strict=True))
    return Claim(Plain(0, bound), times, dict(zip(names, places, strict=True)), rows, "")


def cut(rows, ranks, rank, order):
    """Rows of one rank: blocks of the rounded-up mean, or a head and a tail of even chunks."""
    if order:
        return sum(
            rows // (2 * ranks) + (k < rows % (2 * ranks)) for k in (rank, 2 * ranks - 1 - rank)
        )
    block = -(-rows // ranks)
    return min(max(rows - rank * block, 0), block)


@pytest.mark.parametrize("orders", [*itertools.product([None, "zigzag"], repeat=2)], ids=str)
def test_the_next_size_is_the_least_that_gives_a_rank_its_rows(orders):
    cuts = [(3, orders[0]), (4, orders[1])]
    for places, times in itertools.product([(0, 0), (1, 2), (2, 1), (2, 3)], (1, 2)):
        local = {
            size * times: cut(cut(size, 3, places[0], orders[0]), 4, places[1], orders[1])
            for size in range(TRIED // times)
        }
        for rows in (0, 1, 5):
            found = claim(cuts, places, rows, times)
            for size in (0, 9, 40):
                right = next((s for s in local if s >= size and local[s] == rows), None)
                assert found.next(size) == right, (places, times, rows, size)


def held(found, size):
    (split,) = found.dim.cuts
    return cut(size, split.ranks, found.places["x"], split.order)


def test_sizes_that_fit_several_claims_are_even_ones_or_the_least():
    ways = [
        claim([(n, order)], [rank], rows)
        for n, order in ((2, None), (5, None), (3, "zigzag"))
        for rank in (0, n - 1)
        for rows in (0, 3, 4)
    ]
    for pair in itertools.combinations(ways, 2):
        fits = [s for s in range(50) if all(held(c, s) == c.rows for c in pair)]
        even = [c.even for c in pair if c.even in fits]
        assert find_size(pair) == next(iter(even + fits), None)


@pytest.mark.parametrize("ranks", [4_096, 65_536, 2**24])
@pytest.mark.parametrize("rank", [0, 1, -1])
def test_time_and_memory_do_not_grow_with_the_ranks(ranks, rank):
    tracemalloc.start()
    with use_mesh(MeshShape(cp=ranks), rank % ranks):
        assert isinstance(zeros(2, 3), Sharded[Tensor, "b s@cp"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000  # all sizes that fit the first rank of 4,096 took a gigabyte


def test_two_splits_that_fit_no_size_are_told_on_many_ranks():
    several = [claim([(65_536, None)], [9], 3), claim([(256, None)], [9], 5)]
    assert find_size(several) is None
    assert find_size([several[0], claim([(256, None)], [9], 700)]) == 179_200
