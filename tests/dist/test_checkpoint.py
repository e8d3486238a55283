"""Filling, loading and exporting parameters that are sharded over ranks."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from model.init import fill
from model.shards import stored_block, write_block
from tests.tables import CONFIG


class Block(torch.nn.Module):
    """Two parameters, one of which is too short for four ranks."""

    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(64, 7, bias=False)
        self.mixer = torch.nn.Linear(3, 2)


def fill_sharded():
    """Parameters of a module that is sharded over all ranks, gathered."""
    with torch.device("meta"):
        module = Block()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    fill(module, CONFIG, 9)
    return {name: p.full_tensor().detach() for name, p in module.named_parameters()}


def test_sharded_parameters_are_those_of_one_process(ranks):
    expected = Block()
    fill(expected, CONFIG, 9)
    for filled in ranks(4).run(fill_sharded):
        assert filled.keys() == dict(expected.named_parameters()).keys()
        assert all(torch.equal(filled[name], p) for name, p in expected.named_parameters())


PLACEMENTS = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (Replicate(), Replicate()),
    (Shard(2), Shard(1)),
]


def write_shards():
    """What DTensor itself stores, and what is written block by block, for each placement."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(7 * 5 * 3, dtype=torch.float32).reshape(7, 5, 3)
    out = []
    for placements in PLACEMENTS:
        expected = distribute_tensor(whole, mesh, placements)
        got = DTensor.from_local(
            torch.zeros_like(expected.to_local()),
            mesh,
            placements,
            shape=whole.shape,
            stride=whole.stride(),
        )
        write_block(got, lambda block: whole[block])
        out.append((expected.to_local(), got.to_local()))
    partial = DTensor.from_local(whole, mesh, [Partial(), Replicate()])
    with pytest.raises(ValueError, match="cannot be written under P"):
        stored_block(partial)
    return out


def test_blocks_are_those_of_dtensor(ranks):
    for pairs in ranks(4).run(write_shards):
        assert len(pairs) == len(PLACEMENTS)
        assert all(torch.equal(expected, got) for expected, got in pairs)
