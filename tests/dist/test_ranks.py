import os
import time

import pytest
import torch
import torch.distributed as dist


def sum_of_ranks(weight):
    x = torch.tensor([float(dist.get_rank() * weight)])
    dist.all_reduce(x)
    return os.getpid(), dist.get_world_size(), torch.get_num_threads(), x


def fail_on_last():
    if dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError("a fault of one rank")
    dist.barrier()


def hang_on_first():
    if dist.get_rank() == 0:
        time.sleep(60)


def wrong_shape():
    from vlshard.attention.runs import Runs, segmented_attention

    x = torch.zeros(2, 3)
    segmented_attention(x, x, x, Runs.segments([2]))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_run_a_function_together(ranks, world):
    results = ranks(world).run(sum_of_ranks, 10)
    total = 10.0 * world * (world - 1) / 2
    assert [result[1:3] for result in results] == [(world, 1)] * world
    assert [result[3].item() for result in results] == [total] * world


def test_ranks_stay_between_runs(ranks):
    pids = [[result[0] for result in ranks(2).run(sum_of_ranks, 1)] for _ in range(2)]
    assert pids[0] == pids[1]


def test_ranks_show_the_traceback_of_a_failing_rank(ranks):
    with pytest.raises(AssertionError, match=r"rank 1: Traceback(.|\n)*a fault of one rank"):
        ranks(2).run(fail_on_last)


def test_ranks_kill_a_hung_rank_and_start_again(ranks):
    with pytest.raises(AssertionError, match=r"rank 0: no answer in 2 s(.|\n)*hang_on_first"):
        ranks(2).run(hang_on_first, timeout=2)
    assert len(ranks(2).run(sum_of_ranks, 1)) == 2


def test_ranks_check_shapes(ranks):
    with pytest.raises(AssertionError, match="TypeCheckError"):
        ranks(2).run(wrong_shape)
