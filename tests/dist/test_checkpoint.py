"""Filling, loading and exporting parameters that are sharded over ranks."""

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import zeros as dtensor_zeros

from model.checkpoint.headers import CheckpointError
from model.checkpoint.save_load import load_checkpoint, save_checkpoint
from model.modules.init import fill
from model.modules.shards import write_block
from tests.tables import CONFIG
from vlshard.storage import stored_block


class Block(torch.nn.Module):
    """Two parameters, one of which is too short for four ranks."""

    def __init__(self):
        super().__init__()
        self.odd_head = torch.nn.Linear(64, 7, bias=False)
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
    for filled in ranks(4).run(fill_sharded, timeout=120):
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
        write_block("x", got, lambda block: whole[block])
        out.append((expected.to_local(), got.to_local()))
    partial = DTensor.from_local(whole, mesh, [Partial(), Replicate()])
    with pytest.raises(ValueError, match="cannot be written under P"):
        stored_block(partial)
    return out


def test_blocks_are_those_of_dtensor(ranks):
    for pairs in ranks(4).run(write_shards, timeout=120):
        assert len(pairs) == len(PLACEMENTS)
        assert all(torch.equal(expected, got) for expected, got in pairs)


def random_tensors():
    draw = torch.Generator().manual_seed(0)
    shapes = CONFIG.parameter_shapes().items()
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes}


def sharded(mesh):
    """Parameters of the small config as DTensors, each along another dim than its neighbours."""
    return {
        name: dtensor_zeros(*shape, device_mesh=mesh, placements=[Shard(i % len(shape))])
        for i, (name, shape) in enumerate(CONFIG.parameter_shapes().items())
    }


def load_and_save(source, target):
    """Load into shards, export them; say whether each shard is the right part of the whole."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    tensors, expected = sharded(mesh), random_tensors()
    load_checkpoint(tensors.items(), source, CONFIG)
    parts = [
        distribute_tensor(expected[name], mesh, tensor.placements).to_local()
        for name, tensor in tensors.items()
    ]
    right = [torch.equal(t.to_local(), p) for t, p in zip(tensors.values(), parts, strict=True)]
    save_checkpoint(tensors.items(), target, CONFIG, source=source)
    return right


@pytest.mark.parametrize("shard_bytes", [10**9, 200_000])
def test_shards_are_loaded_and_exported(ranks, tmp_path, shard_bytes):
    source, target = tmp_path / "source", tmp_path / "target"
    save_checkpoint(random_tensors().items(), source, CONFIG, shard_bytes=shard_bytes)
    for right in ranks(2).run(load_and_save, source, target, timeout=120):
        assert len(right) == len(CONFIG.parameter_shapes())
        assert all(right)
    assert contents(target) == contents(source)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def save_over(target):
    """The error of an export onto a folder that only the writing rank looks at."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    try:
        save_checkpoint(sharded(mesh).items(), target, CONFIG)
    except CheckpointError as error:
        return str(error)


def fail_to_write(target):
    """The error of an export whose second file cannot be written."""
    mesh, left = init_device_mesh("cpu", (torch.distributed.get_world_size(),)), [1]

    def once(*args):
        if not left:
            raise OSError("no space left on device")
        left.pop()
        return save_file(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.checkpoint.save_load.save_file", once)
        try:
            save_checkpoint(sharded(mesh).items(), target, CONFIG, shard_bytes=200_000)
        except CheckpointError as error:
            return str(error)


def test_a_target_that_may_not_be_replaced_fails_on_every_rank(ranks, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    errors = ranks(2).run(save_over, tmp_path, timeout=120)
    assert errors == [f"{tmp_path} holds notes.txt, which no export writes: it is not replaced"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failure_to_write_is_raised_on_every_rank(ranks, tmp_path):
    errors = ranks(2).run(fail_to_write, tmp_path / "export", timeout=120)
    text = f"{tmp_path / 'export'} cannot be written: no space left on device"
    assert errors == [text] * 2
    assert list(tmp_path.iterdir()) == []
