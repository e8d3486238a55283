"""FSDP2's collectives on the CPU: what they give, and that they keep what they are given."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from model.config.config import Config
from tests.batches import batches
from tests.tiny import tiny_config
from tests.training import Run, gradient_faults
from vlshard.storage.fsdp_collectives import Buffers, GlooAllGather, GlooReduceScatter, LARGE, MOST


def gathered(in_place):
    """Shards of three numbers, the rank's own in its place already or not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gather = GlooAllGather(Buffers())
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
    reduce = GlooReduceScatter(Buffers())
    reduce(out, parts, dist.group.WORLD, dist.ReduceOp.SUM)
    with pytest.raises(ValueError, match="gradients are summed, not reduced by"):
        reduce(out, parts, dist.group.WORLD, dist.ReduceOp.MAX)
    return out.tolist(), torch.equal(parts, kept)


def test_each_part_is_the_sum_over_ranks(ranks):
    assert ranks(2).run(scattered) == [([100.0 + 2 * r] * 2, True) for r in range(2)]
    assert ranks(4).run(scattered) == [([600.0 + 4 * r] * 2, True) for r in range(4)]


def gathers_of_a_step(raw):
    """How many units there are, and how often each size of shard is gathered in one step."""
    run, seen = Run(Config.from_dict(raw), "plans/baseline_dp.py"), []
    plain = GlooAllGather.__call__

    def noted(self, output_tensor, input_tensor, group, async_op=False):
        seen.append(output_tensor.numel())
        plain(self, output_tensor, input_tensor, group, async_op)

    GlooAllGather.__call__ = noted
    try:
        run.probe(batches(run.config)["mixed sizes"])
    finally:
        GlooAllGather.__call__ = plain
    table = run.config.parameter_shapes()["lm_head.weight"]
    return len(run.config.units()), len(seen), seen.count(table[0] * table[1])


def test_backward_gathers_again_only_what_it_needs(ranks):
    """The head stays from forward to backward, the root does, and an embedding is not needed."""
    config = tiny_config()
    assert config.lookups() == ("model.language_model.embed_tokens",)
    units = len(config.units())
    tables = 2  # of the head's size: the embedding's and its own, each once
    assert ranks(2).run(gathers_of_a_step, config.raw) == [(units, 2 * units - 3, tables)] * 2


def test_a_buffer_is_handed_out_again_only_when_nobody_holds_it():
    buffers, cpu, count = Buffers(), torch.device("cpu"), LARGE // 4
    first = buffers.take((count,), torch.float32, cpu)
    place, view = first.data_ptr(), first[3:5].as_strided((2,), (1,))
    other = buffers.take((count,), torch.float32, cpu)
    assert other.data_ptr() != place
    del first
    assert buffers.take((count,), torch.float32, cpu).data_ptr() not in (place, other.data_ptr())
    del view
    free = [buffers.take((count // 2, 2), torch.float32, cpu) for _ in range(2)]
    assert place in [x.data_ptr() for x in free]
    assert buffers.take((count,), torch.int32, cpu).data_ptr() != place


def test_a_kept_buffer_serves_training_after_inference():
    buffers = Buffers()
    with torch.inference_mode():
        buffers.take((LARGE,), torch.float32, torch.device("cpu"))
    assert not buffers.take((LARGE,), torch.float32, torch.device("cpu")).is_inference()


def test_few_large_buffers_are_kept():
    buffers, cpu = Buffers(), torch.device("cpu")
    for count in range(LARGE, LARGE + 2 * MOST):
        buffers.take((count,), torch.uint8, cpu)
    buffers.take((LARGE - 1,), torch.uint8, cpu)
    kept = sorted(x.numel() for x in buffers._kept)
    assert kept == [LARGE + MOST + k for k in range(MOST)]


def test_gradients_get_memory_of_their_own():
    reduce, cpu, count = GlooReduceScatter(Buffers()), torch.device("cpu"), LARGE
    places = [reduce.allocate((count,), dtype=torch.float32, device=cpu) for _ in range(2)]
    parts = places[0].data_ptr()
    assert {x.data_ptr() for x in reduce._buffers._kept} == {parts}
    del places
    assert reduce.allocate((count,), dtype=torch.float32, device=cpu).data_ptr() == parts


def stored_after_evaluation(raw):
    """Which parameters are not in shards after a pass without gradients, and a step after it."""
    run, single = (Run(Config.from_dict(raw), plan) for plan in ("plans/baseline_dp.py", None))
    batch = batches(run.config)["mixed sizes"]
    run.probe(batch)
    with torch.no_grad():
        for parameter in run.trained:
            parameter.mul_(1.5)
        for header in run.headers(batch):
            run.one_forward_backward(batch, header, run.bound.step(header))
    whole = [n for n, p in run.model.named_parameters() if not isinstance(p, DTensor)]
    with torch.no_grad():
        for parameter in single.trained:
            parameter.mul_(1.5)
    return whole, gradient_faults(run.probe(batch), single.probe(batch))


def test_a_pass_without_gradients_leaves_no_gathered_parameters(ranks):
    """Nothing gathered outlives it: the next step sees new weights, an export the stored ones."""
    assert ranks(2).run(stored_after_evaluation, tiny_config().raw) == [([], [])] * 2
