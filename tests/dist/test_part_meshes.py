"""Meshes over some of the ranks, meshes from DeviceMeshes, and what is refused of either."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.tiny import tiny_config
from vlshard import (
    Mesh,
    MeshShape,
    Plan,
    PlanError,
    fsdp,
    layout,
    load_plan,
    reshard,
    start,
    to_dtensor,
    use_mesh,
)
from vlshard.comm.mesh import any_world
from vlshard.comm.reshard import bound_program, running_mesh


def refusal(attempt, kind=PlanError):
    with pytest.raises(kind) as error:
        attempt()
    return str(error.value)


def on_two_parts():
    """Ranks 3 and 1, in that order, and 0 and 2 by themselves; nobody makes another's group."""
    me = dist.get_rank()
    odd, even = Mesh(cp=2, ranks=[3, 1]), Mesh(cp=2, ranks=[0, 2])
    mine, other = (odd, even) if me % 2 else (even, odd)
    assert other.rank is None
    assert mine.rank == {3: 0, 1: 1, 0: 0, 2: 1}[me]
    assert list(mine.ranks) == ([3, 1] if me % 2 else [0, 2])
    whole = torch.arange(8.0).reshape(4, 2) + 100 * (me % 2)
    rows = layout("s@cp h", mine, s=4, h=2).indices(mine.rank)[0]
    x = whole[torch.from_numpy(rows)].requires_grad_()
    y = reshard(x, "s@cp h -> s h@cp", mine)
    assert torch.equal(y.detach(), whole[:, mine.rank : mine.rank + 1])
    (y * (1 + mine.rank)).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0, 2.0]] * 2))
    assert torch.equal(start(x.detach(), "s@cp h -> s h", mine).wait(), whole)
    assert torch.equal(reshard(x.detach(), "s h + cp -> s h", mine), whole[:2] + whole[2:])
    wrapped = to_dtensor(x.detach(), "s@cp h", mine)
    assert torch.equal(wrapped.full_tensor(), whole)
    trained = mine.device_mesh(("cp",)).mesh.tolist()
    assert trained == list(mine.ranks)
    return refusal(lambda: reshard(x, "s@cp h -> s h", other))


def test_parts_of_the_world_move_rows_among_themselves(ranks):
    texts = ranks(4).run(on_two_parts)
    assert texts[1] == (
        "rank 1 is not on this mesh of ranks 0, 2\n  mesh: cp=2\n"
        "  fix: only the ranks of a mesh use it; mesh.rank is None on the others"
    )
    assert texts[0].startswith("rank 0 is not on this mesh of ranks 3, 1\n")


def outside():
    """Rank 3 is on no mesh, makes no group, and is refused wherever it would have to be there."""
    mesh = Mesh(dp=1, cp=3, ranks=range(3))
    if dist.get_rank() < 3:
        return reshard(torch.ones(2), "s + cp -> s", mesh).tolist()
    x = torch.ones(2)
    for attempt in (
        lambda: mesh.group(("cp",)),
        lambda: mesh.make_groups([("cp",)]),
        lambda: mesh.device_mesh(("dp", "cp")),
        lambda: mesh.parts_mesh(),
        lambda: start(x, "s -> s@cp", mesh),
        lambda: to_dtensor(x, "s@cp", mesh),
        lambda: use_mesh(mesh).__enter__(),
    ):
        assert refusal(attempt).startswith("rank 3 is not on this mesh of ranks 0, 1, 2\n")
    assert mesh.rank is None
    assert layout("s@cp", mesh, s=6).local_shape(1) == (2,)  # arithmetic needs no rank
    return None


def test_a_rank_outside_is_refused_and_not_waited_for(ranks):
    assert ranks(4).run(outside, timeout=30) == [[3.0, 3.0]] * 3 + [None]


def made():
    """What construction says in a world of four."""
    found = {
        "small": refusal(lambda: Mesh(dp=1, cp=2)),
        "none": refusal(Mesh),
        "count": refusal(lambda: Mesh(cp=2, ranks=[0, 1, 2])),
        "twice": refusal(lambda: Mesh(cp=2, ranks=[1, 1])),
        "beyond": refusal(lambda: Mesh(cp=2, ranks=[0, 4])),
        "odd": refusal(lambda: Mesh(cp=2, ranks=[0, True])),
        "below": refusal(lambda: Mesh(cp=2, ranks=[0, -1])),
        "large": refusal(lambda: Mesh(cp=8).group(("cp",))),
    }
    with any_world():
        assert Mesh(cp=2).size == 2
    assert load_plan("plans/single.py", 1).mesh.size == 1
    assert Mesh(cp=4, ranks=range(4)) == Mesh(cp=4)
    assert repr(Mesh(cp=2, ranks=[2, 3])) == "Mesh(cp=2, ranks=[2, 3])"
    assert repr(Mesh(ranks=[2])) == "Mesh(ranks=[2])"
    return found


def test_a_mesh_that_is_not_the_world_says_so_when_it_is_made(ranks):
    first, *others = ranks(4).run(made)
    assert all(found == first for found in others)
    assert first == {
        "small": "the mesh has 2 ranks, the world 4\n  mesh: dp=1 cp=2\n"
        "  fix: Mesh(dp=1, cp=2, ranks=[...]) for 2 of the ranks, "
        "or MeshShape(dp=1, cp=2) for sizes only",
        "none": "the mesh has 1 ranks, the world 4\n  mesh: no axes\n"
        "  fix: Mesh(ranks=[...]) for 1 of the ranks, or MeshShape() for sizes only",
        "count": "the mesh has 2 ranks, and ranks= names 3\n  mesh: cp=2",
        "twice": "ranks=[1, 1]: a rank is named twice\n  mesh: cp=2",
        "beyond": "ranks= names rank 4, and the world has 4 ranks\n  mesh: cp=2",
        "odd": "ranks=[0, True]: True is no global rank\n  mesh: cp=2",
        "below": "ranks=[0, -1]: -1 is no global rank\n  mesh: cp=2",
        "large": "the mesh has 8 ranks, the world 4\n  mesh: cp=8",
    }


def from_device_meshes():
    """The world, a slice of it, its dims turned, a part with axes in parts; groups are shared."""
    me = dist.get_rank()
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mesh = Mesh.from_device_mesh(world)
    assert mesh == MeshShape(dp=2, cp=2)
    assert list(mesh.ranks) == [0, 1, 2, 3]
    assert mesh.rank == me
    assert mesh.group(("cp",)) is world.get_group("cp")
    assert mesh.parts_mesh() is world
    x = torch.arange(4.0) + 10 * me
    assert torch.equal(reshard(x, "s -> s@(dp cp)", mesh), x[me : me + 1])
    dtensor = to_dtensor(x, "s@dp", mesh)
    assert dtensor.device_mesh is world

    row = Mesh.from_device_mesh(world["cp"])
    assert list(row.ranks) == [me // 2 * 2, me // 2 * 2 + 1]
    assert row.rank == me % 2
    pair = sum(torch.arange(4.0) + 10 * rank for rank in row.ranks)
    assert torch.equal(reshard(x, "s + cp -> s", row), pair)

    turned = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=("cp.ring", "cp.all"))
    mesh = Mesh.from_device_mesh(turned)
    assert list(mesh.ranks) == [3, 1, 2, 0]
    place = mesh.rank
    assert place == [3, 1, 2, 0].index(me)
    assert mesh.sizes == {"cp": 4}
    assert torch.equal(reshard(x, "s -> s@cp", mesh), x[place : place + 1])
    whole = torch.cat([torch.arange(4.0) + 10 * rank for rank in (3, 1, 2, 0)])
    assert torch.equal(reshard(x, "s@cp -> s", mesh), whole)

    unnamed = refusal(lambda: Mesh.from_device_mesh(DeviceMesh("cpu", torch.arange(4))))
    apart = DeviceMesh("cpu", torch.arange(4).view(2, 1, 2), mesh_dim_names=("cp.a", "dp", "cp.b"))
    return unnamed, refusal(lambda: Mesh.from_device_mesh(apart)), refused(world, x, dtensor)


def refused(world, x, dtensor):
    """What ``reshard``, ``start`` and ``to_dtensor`` say; the shape hook would say it first."""
    mesh = Mesh.from_device_mesh(world)
    return [
        refusal(lambda: bound_program(x, "s -> s@dp", world, {})),
        refusal(lambda: running_mesh(world)),
        refusal(lambda: bound_program(x, "s -> s@dp", MeshShape(dp=2), {})),
        refusal(lambda: bound_program(x, "s -> s@dp", None, {})),
        refusal(lambda: bound_program(dtensor, "s@dp -> s", mesh, {}), TypeError),
        refusal(lambda: bound_program([1], "s -> s@dp", mesh, {}), TypeError),
    ]


def test_a_device_mesh_becomes_a_mesh_and_is_refused_where_a_mesh_is_meant(ranks):
    for unnamed, apart, texts in ranks(4).run(from_device_meshes):
        assert unnamed == (
            "a DeviceMesh without names has no axes to speak of\n"
            "  fix: init_device_mesh(..., mesh_dim_names=(...))"
        )
        assert apart == "the mesh has parts of an axis apart: cp.a dp cp.b"
        device = (
            "a DeviceMesh takes no specs\n"
            "  fix: Mesh.from_device_mesh(mesh), made once, has the same ranks and axes"
        )
        assert texts == [
            device,
            device,
            "a MeshShape has no ranks to send between\n"
            "  MeshShape(dp=2) is sizes only; make a Mesh on the running ranks",
            "a NoneType has no ranks to send between",
            "local tensors are resharded, not DTensors: from_dtensor(x) gives this rank's part, "
            "to_dtensor wraps what comes out",
            "a torch.Tensor is resharded, not a builtins.list",
        ]


def planned():
    plan = Plan(
        mesh=Mesh(dp=2, ranks=[2, 3]),
        params={"**": fsdp("dp")},
        layouts={"vision.patches": "(img@dp.home s) c", "text.tokens": "b@dp.home s m"},
    )
    return refusal(lambda: plan.bind(tiny_config(), 2))


def test_a_plan_takes_the_whole_world(ranks):
    assert ranks(4).run(planned) == [
        "a plan's mesh is the whole world in order, not ranks [2, 3]\n"
        "  plan mesh\n  fix: leave ranks= out"
    ] * 4


def test_without_a_process_group_a_part_is_arithmetic():
    mesh = Mesh(cp=2, ranks=[0, 5])
    assert mesh.rank == 0
    assert Mesh(cp=2, ranks=[4, 5]).rank is None
    assert layout("s@cp", mesh, s=4).local_shape(mesh.rank) == (2,)
