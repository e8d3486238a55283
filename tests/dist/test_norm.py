import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vlshard.storage.norm import clip_gradients, grad_norm, local_part

DENSE = torch.tensor([[1.0, 2.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]])  # norm 3
EXPERTS = torch.tensor([[2.4, 0.0], [0.0, 3.2]])  # norm 4, 2.4 and 3.2 by expert


def mesh_of(*shape, names=("outer", "inner")):
    names = names[-len(shape) :]
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(shape), mesh_dim_names=names)


def parameter(gradient, mesh=None, placements=()):
    """A parameter whose gradient is the whole tensor, stored as the placements say."""
    if mesh is not None:
        local = gradient
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                chunks = local.chunk(mesh.size(dim), placement.dim)
                place = mesh.get_coordinate()[dim]
                local = chunks[place] if place < len(chunks) else local[:0]
        gradient = DTensor.from_local(
            local.clone(), mesh, placements, shape=gradient.shape, stride=gradient.stride()
        )
    result = torch.nn.Parameter(torch.zeros_like(gradient))
    result.grad = gradient if mesh is not None else gradient.clone()
    return result


def cases(world):
    """Per name, parameters whose gradients have norm 3 and 4 in all, on meshes of many kinds."""
    flat = mesh_of(world)
    yield "sharded", [parameter(DENSE, flat, [Shard(0)]), parameter(EXPERTS, flat, [Shard(0)])]
    yield "replicated", [parameter(DENSE, flat, [Replicate()]), parameter(EXPERTS)]
    vision = parameter(DENSE, mesh_of(world, 1), [Replicate(), Shard(0)])
    yield (
        "vision replicated, decoder sharded",
        [vision, parameter(EXPERTS, flat, [Shard(0)]), torch.nn.Parameter(torch.ones(2))],
    )
    if world == 4:
        mesh = mesh_of(2, 2, names=("dp", "ep"))
        dense = parameter(DENSE, flat, [Shard(0)])
        yield "dp2 x ep2", [dense, parameter(EXPERTS, mesh, [Replicate(), Shard(0)])]
        yield (
            "dp2 x ep2, experts on the ep dim alone",
            [parameter(DENSE), parameter(EXPERTS, mesh["ep"], [Shard(0)])],
        )
        yield (
            "HSDP 2x2",
            [parameter(x, mesh, [Replicate(), Shard(0)]) for x in (DENSE, EXPERTS)],
        )
        turned = [
            parameter(DENSE, mesh, [Shard(0), Shard(1)]),
            parameter(EXPERTS, mesh, [Shard(0), Replicate()]),
        ]
        yield "cp2", turned


def norms_and_clipped():
    world = dist.get_world_size()
    results = {}
    for name, parameters in cases(world):
        before = [local_part(p.grad).clone() for p in parameters if p.grad is not None]
        norm = grad_norm(p for p in parameters).item()
        clipped = clip_gradients((p for p in parameters), 1.0).item()
        after = [local_part(p.grad) for p in parameters if p.grad is not None]
        error = max((a - 0.2 * b).abs().sum().item() for a, b in zip(after, before, strict=True))
        results[name] = (norm, clipped, error)
    return results


def norm_of_trained_model():
    torch.manual_seed(0)
    world = dist.get_world_size()
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    data = torch.randn(world, 5)
    model(data).square().sum().backward()
    expected = grad_norm(model.parameters()).item()
    model.zero_grad()
    for unit, mesh in zip((*model, model), (mesh_of(world, 1), mesh_of(world)) * 2, strict=False):
        fully_shard(unit, mesh=mesh)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    model(data[dist.get_rank() :][:1]).square().sum().backward()
    return expected, grad_norm(model.parameters()).item()


def huge_norms():
    """Only one shard, then none, holds what float32 squares cannot."""
    flat = mesh_of(dist.get_world_size())
    found = []
    for factor in (1e20, 1e-25):
        mixed = [parameter(DENSE * factor, flat, [Shard(0)]), parameter(EXPERTS * factor)]
        norm = clip_gradients(mixed, 1.0).item()
        found.append((norm, local_part(mixed[1].grad).flatten().tolist()))
    return found


def norms_without_rank_0():
    """Norms 3 and 4 in all on rank 1 alone, which rank 0 knows nothing of; then none at all."""
    if dist.get_rank() == 0:
        return [grad_norm([]).item(), clip_gradients([], 1.0).item(), grad_norm([]).item()]
    alone = DeviceMesh("cpu", [1], mesh_dim_names=("inner",))
    mine = [parameter(DENSE, alone, [Shard(0)]), parameter(EXPERTS, alone, [Replicate()])]
    found = [grad_norm(mine).item(), clip_gradients(mine, 1.0).item()]
    for each in mine:
        each.grad.zero_()
    return [*found, grad_norm(mine).item()]


def norm_of_pending_sum():
    try:
        grad_norm([parameter(DENSE, mesh_of(dist.get_world_size()), [Partial()])])
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("world", [2, 4])
def test_norm_counts_each_element_once(ranks, world):
    results = ranks(world).run(norms_and_clipped)
    assert results[0].keys() >= {"sharded", "replicated", "vision replicated, decoder sharded"}
    for result in results:
        for name, (norm, clipped, error) in result.items():
            assert norm == pytest.approx(5.0, rel=1e-6), name
            assert clipped == norm, name
            assert error < 1e-6, name


def test_norm_does_not_overflow_on_one_rank_only(ranks):
    for (large, clipped), (small, kept) in ranks(2).run(huge_norms):
        assert (large, small) == pytest.approx((5e20, 5e-25), rel=1e-6, abs=0)
        assert clipped == pytest.approx([0.48, 0, 0, 0.64], rel=1e-6)
        assert kept == pytest.approx([2.4e-25, 0, 0, 3.2e-25], rel=1e-6, abs=0)


@pytest.mark.parametrize("world", [2, 4])
def test_norm_of_a_sharded_model_is_that_of_one_process(ranks, world):
    for expected, norm in ranks(world).run(norm_of_trained_model):
        assert norm == pytest.approx(expected, rel=1e-6)


def test_norm_of_ranks_without_rank_0_is_counted(ranks):
    for found in ranks(2).run(norms_without_rank_0):
        assert found == pytest.approx([5.0, 5.0, 0.0], rel=1e-6)


def test_norm_refuses_a_pending_sum(ranks):
    for text in ranks(2).run(norm_of_pending_sum):
        assert text == "a gradient with placements (Partial(sum),) is not summed yet"
