from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vlshard.comm.mesh import Mesh
from vlshard.language.errors import PlanError
from vlshard.language.mesh_shape import MeshShape

LAWS = settings(derandomize=True, database=None, deadline=None, max_examples=100)


def test_mesh_is_frozen_and_compares_by_axes_in_order():
    mesh = MeshShape(dp=2, cp=4)
    assert mesh == MeshShape(dp=2, cp=4) == Mesh(dp=2, cp=4)
    assert hash(mesh) == hash(Mesh(dp=2, cp=4))
    assert mesh != MeshShape(cp=4, dp=2)
    assert (str(mesh), repr(mesh)) == ("dp=2 cp=4", "MeshShape(dp=2, cp=4)")
    assert dict(mesh.sizes) == {"dp": 2, "cp": 4}
    with pytest.raises(AttributeError, match="a mesh is frozen: cannot set 'size'"):
        mesh.size = 3


def test_an_axis_may_have_any_name():
    sizes = {"self": 2, "sizes": 3}
    assert MeshShape(**sizes).sizes == Mesh(**sizes).sizes == sizes


def test_mesh_without_axes_has_one_rank():
    mesh = MeshShape()
    assert (mesh.size, mesh.coords(0), mesh.peers((), 0)) == (1, {}, (0,))


def test_mesh_of_many_ranks_needs_none_of_them():
    mesh = MeshShape(pod=64, dp=128, cp=8)
    assert mesh.size == 65536
    assert mesh.coords(65535) == {"pod": 63, "dp": 127, "cp": 7}
    assert mesh.peers(("cp",), 1025) == tuple(range(1024, 1032))


@pytest.mark.parametrize(
    ("axes", "rank", "peers"),
    [
        (("cp",), 4, (4, 6)),
        (("tp",), 4, (4, 5)),
        (("dp",), 3, (3, 7)),
        (("cp", "tp"), 6, (4, 5, 6, 7)),
        (("tp", "cp"), 6, (4, 6, 5, 7)),
        (("dp", "one"), 0, (0, 4)),
        ((), 5, (5,)),
    ],
)
def test_peers_are_in_the_order_of_the_axes(axes, rank, peers):
    assert MeshShape(dp=2, cp=2, tp=2, one=1).peers(axes, rank) == peers


@LAWS
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_coords_and_rank_are_inverse(sizes, data):
    mesh = MeshShape(**{f"x{i}": size for i, size in enumerate(sizes)})
    rank = data.draw(st.integers(0, mesh.size - 1))
    assert mesh.rank_at(mesh.coords(rank)) == rank


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 0, "cp": 2}, "mesh axis dp=0: a size is at least 1"),
        ({"dp": True}, "mesh axis dp=True: a size is an integer"),
    ],
)
def test_mesh_refuses_wrong_sizes(sizes, message):
    with pytest.raises(PlanError) as error:
        MeshShape(**sizes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.coords(8), "rank 8 is not on the mesh of 8 ranks\n  mesh: dp=2 cp=4"),
        (lambda m: m.rank_at({"cp": 4}), "there is no cp=4\n  mesh: dp=2 cp=4"),
        (
            lambda m: m.peers(("xp",), 0),
            "unknown mesh axis 'xp'\n  mesh: dp=2 cp=4; did you mean 'cp' or 'dp'?",
        ),
        (
            lambda m: m.span(("dp", "dp")),
            "a mesh axis is named twice: dp dp\n  mesh: dp=2 cp=4",
        ),
        (
            lambda m: m.group(("cp",)),
            "no process group: start the ranks with torchrun and initialise torch first\n"
            "  mesh: dp=2 cp=4",
        ),
    ],
)
def test_mesh_says_what_is_wrong(call, message):
    mesh = Mesh(dp=2, cp=4)
    assert mesh.rank == 0
    with pytest.raises(PlanError) as error:
        call(mesh)
    assert str(error.value) == message


def group_members(order):
    """Global ranks of each group in group order, and a sum over the ranks of one."""
    mesh = Mesh(dp=2, cp=2)
    mesh.make_groups(order)
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=mesh.group(("cp",)))
    names = [("dp",), ("cp",), ("dp", "cp"), ("cp", "dp")]
    groups = [mesh.group(axes) for axes in names]
    assert groups == [mesh.group(axes) for axes in names]
    members = [dist.get_process_group_ranks(group) for group in groups]
    return members, [dist.get_group_rank(groups[3], r) for r in range(4)], total.item()


def test_groups_hold_peers_in_their_order(ranks):
    mesh = MeshShape(dp=2, cp=2)
    sets = [("cp", "dp"), ("cp",), ("dp",), ("cp",)]
    for rank, (members, turned, total) in enumerate(ranks(4).run(group_members, sets)):
        sums = [("dp",), ("cp",), ("dp", "cp")]
        assert [tuple(m) for m in members[:3]] == [mesh.peers(axes, rank) for axes in sums]
        assert [turned.index(place) for place in range(4)] == list(mesh.peers(("cp", "dp"), rank))
        assert total == sum(mesh.peers(("cp",), rank))


def stored_rows():
    """Per choice of axes: the mesh's ranks, and where this rank's rows are and claim to be."""
    mesh = Mesh(dp=2, cp=2)
    results = []
    for shard, replicate in [(("dp", "cp"), ()), (("cp",), ("dp",)), (("dp",), ("cp",))]:
        results.append(stored(mesh.device_mesh(shard, replicate)))
        assert mesh.device_mesh(shard, replicate) is mesh.device_mesh(shard, replicate)
    results.append(stored(mesh.device_mesh((), ("cp", "dp"))))
    faults = []
    for shard, replicate in [(("cp", "dp"), ()), (("cp",), ()), (("cp",), ("cp", "dp"))]:
        try:
            mesh.device_mesh(shard, replicate)
        except PlanError as error:
            faults.append(str(error))
    try:
        Mesh(dp=3).device_mesh(("dp",))
    except PlanError as error:
        faults.append(str(error))
    return results, faults


def stored(device_mesh):
    linear = torch.nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(4.0)[:, None])
    weight = fully_shard(linear, mesh=device_mesh).weight
    _, offset = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    names = device_mesh.mesh_dim_names
    return names, device_mesh.mesh.tolist(), weight.to_local().flatten().tolist(), offset[0]


def test_device_mesh_stores_what_it_names(ranks):
    both = ("replicate", "shard")
    expected = [
        [
            (("shard",), [0, 1, 2, 3], [float(rank)], rank),
            (both, [[0, 1], [2, 3]], [[0.0, 1.0], [2.0, 3.0]][rank % 2], 2 * (rank % 2)),
            (both, [[0, 2], [1, 3]], [[0.0, 1.0], [2.0, 3.0]][rank // 2], 2 * (rank // 2)),
            (both, [[0], [1], [2], [3]], [0.0, 1.0, 2.0, 3.0], 0),
        ]
        for rank in range(4)
    ]
    results = ranks(4).run(stored_rows)
    assert [rows for rows, _ in results] == expected
    for _, faults in results:
        assert faults == [
            "parameters cannot be cut over (cp dp), only in mesh order\n"
            "  mesh: dp=2 cp=2\n  fix: (dp cp)",
            "parameters are neither cut nor whole over dp\n  mesh: dp=2 cp=2",
            "a mesh axis is named twice: cp dp cp\n  mesh: dp=2 cp=2",
            "the mesh has 3 ranks, the world 4\n  mesh: dp=3\n"
            "  fix: Mesh(dp=3, ranks=[...]) for 3 of the ranks, or MeshShape(dp=3) for sizes only",
        ]


SPLIT = MeshShape(dp=2, cp=(2, 4))
NAMED = MeshShape(cp={"ring": 2, "ulysses": 4})


def test_a_split_axis_means_all_its_parts():
    assert dict(SPLIT.sizes) == {"dp": 2, "cp": 8}
    assert dict(SPLIT.parts) == {"dp": 2, "cp.0": 2, "cp.1": 4}
    assert SPLIT.expand(("cp", "dp")) == ("cp.0", "cp.1", "dp")
    assert SPLIT.coords(13) == {"dp": 1, "cp.0": 1, "cp.1": 1}
    assert SPLIT.rank_at({"cp.0": 1}) == 4
    assert SPLIT.peers(("cp.0",), 1) == (1, 5)
    assert SPLIT.peers(("cp.1", "cp.0"), 8) == (8, 12, 9, 13, 10, 14, 11, 15)
    assert SPLIT.peers(("cp",), 8) == tuple(range(8, 16))
    assert dict(NAMED.parts) == {"cp.ring": 2, "cp.ulysses": 4}


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("dp",), "dp"),
        (("cp.0",), "cp.0"),
        (("cp.0", "cp.1"), "cp"),
        (("cp.1", "cp.0"), "(cp.1 cp.0)"),
        (("dp", "cp.0", "cp.1"), "(dp cp)"),
        (("cp.1", "dp"), "(cp.1 dp)"),
    ],
)
def test_parts_are_written_as_in_the_language(parts, text):
    assert SPLIT.text(parts) == text
    assert SPLIT.read(text) == parts


def test_split_meshes_print_and_compare():
    assert (str(SPLIT), repr(SPLIT)) == ("dp=2 cp=(2, 4)", "MeshShape(dp=2, cp=(2, 4))")
    assert str(NAMED) == "cp=(ring=2, ulysses=4)"
    assert repr(NAMED) == "MeshShape(cp={'ring': 2, 'ulysses': 4})"
    assert SPLIT == Mesh(dp=2, cp=(2, 4)) != MeshShape(dp=2, cp=8)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((), "mesh axis cp=(): a split axis has at least one part"),
        ((2, 0), "mesh axis cp.1=0: a size is at least 1"),
        ({"zigzag": 2}, "mesh axis cp: a part cannot be named like the order '.zigzag'"),
        ({"a b": 2}, "mesh axis cp: a part cannot be named 'a b'"),
        ((2, True), "mesh axis cp.1=True: a size is an integer"),
    ],
)
def test_split_axes_are_checked(size, message):
    with pytest.raises(PlanError) as error:
        MeshShape(cp=size)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("mesh", "axis", "message"),
    [
        (
            NAMED,
            "cp.ulises",
            "mesh axis 'cp' has no part 'ulises'\n"
            "  mesh: cp=(ring=2, ulysses=4); did you mean 'cp.ulysses'?",
        ),
        (
            MeshShape(cp=2),
            "cp.0",
            "mesh axis 'cp' is not split, so it has no part '0'\n  mesh: cp=2",
        ),
        (
            SPLIT,
            "xp.0",
            "unknown mesh axis 'xp'\n  mesh: dp=2 cp=(2, 4); did you mean 'cp' or 'dp'?",
        ),
    ],
)
def test_unknown_parts_are_named(mesh, axis, message):
    with pytest.raises(PlanError) as error:
        mesh.peers((axis,), 0)
    assert str(error.value) == message


def time_limits():
    """Of the default group, and of one that a mesh makes in it."""
    groups = dist.group.WORLD, Mesh(cp=2).group(["cp"])
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_groups_take_over_the_time_limit_of_the_default_group(ranks):
    for default, own in ranks(2).run(time_limits):
        assert own == default != timedelta(minutes=30)  # torch's own for new groups
