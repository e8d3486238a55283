"""FSDP2's collectives on the CPU: what they give, and that they keep what they are given."""

import pytest
import torch
import torch.distributed as dist

from vlshard.gloo import GlooAllGather, GlooReduceScatter


def gathered(in_place):
    """Shards of three numbers, the rank's own in its place already or not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gather = GlooAllGather()
    whole = gather.allocate((3 * size,), dtype=torch.float32, device=torch.device("cpu"))
    whole.fill_(-1.0)
    shard = torch.arange(3.0) + 10 * rank
    if in_place:
        shard = whole[3 * rank : 3 * rank + 3].copy_(shard)
    gather(whole, shard, dist.group.WORLD)
    return whole.tolist()


@pytest.mark.parametrize("in_place", [True, False])
def test_shards_come_in_group_order(in_place, ranks):
    expected = [[0.0, 1, 2, 10, 11, 12], [0.0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]]
    assert ranks(2).run(gathered, in_place) == [expected[0]] * 2
    assert ranks(4).run(gathered, in_place) == [expected[1]] * 4


def scattered():
    """Part k of rank r is 100 r + k; also whether the parts are as they were, and the refusal."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = (100.0 * rank + torch.arange(float(size))).repeat_interleave(2)
    kept = parts.clone()
    out = torch.empty(2)
    GlooReduceScatter()(out, parts, dist.group.WORLD, dist.ReduceOp.SUM)
    with pytest.raises(ValueError, match="gradients are summed, not reduced by"):
        GlooReduceScatter()(out, parts, dist.group.WORLD, dist.ReduceOp.MAX)
    return out.tolist(), torch.equal(parts, kept)


def test_each_part_is_the_sum_over_ranks(ranks):
    assert ranks(2).run(scattered) == [([100.0 + 2 * r] * 2, True) for r in range(2)]
    assert ranks(4).run(scattered) == [([600.0 + 4 * r] * 2, True) for r in range(4)]
