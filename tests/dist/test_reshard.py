"""Reshard and exchange between ranks: dtypes, empty tensors, gradient modes, what is sent."""

import numpy as np
import warnings

import pytest
import torch
from torch.autograd import forward_ad
import torch.distributed as dist

from tests.dense_moves import dense_moves
from vlshard import MeshShape, transition
from vlshard.comm.collectives import all_reduce, exchange_rows
from vlshard.language.errors import LayoutError
from vlshard.comm.mesh import Mesh
from vlshard.comm.reshard import reshard
from vlshard.comm.transport import (
    Landing,
    launch_gather,
    launch_messages,
    launch_scatter,
    launch_single,
    way_of,
    Way,
)
from vlshard.programs import Even, route

HAVE = [np.arange(0, 5), np.arange(5, 5), np.arange(5, 7), np.arange(7, 12)]
WANT = [np.array([11, 3]), np.array([0, 11, 6]), np.arange(12), np.arange(0)]
# Row i's gradient is the sum of 10**k over the ranks k that want it.
GRADS = [[110, 100, 100, 101, 100], [], [100, 110], [100, 100, 100, 100, 111]]


def exchange(dtype):
    rank = dist.get_rank()
    x = torch.arange(12).to(dtype)[torch.from_numpy(HAVE[rank])][:, None].expand(-1, 3)
    x = x.clone().requires_grad_()
    y = exchange_rows(x, 0, dense_moves(HAVE, WANT, rank), dist.group.WORLD)
    y.backward(torch.full_like(y, 10**rank))
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_exchange_of_uneven_and_empty_blocks(ranks, dtype):
    for rank, (y, gradient) in enumerate(ranks(4).run(exchange, dtype)):
        assert y.dtype == gradient.dtype == dtype
        assert y.tolist() == [[float(row)] * 3 for row in WANT[rank]]
        assert gradient.tolist() == [[float(g)] * 3 for g in GRADS[rank]]


def move(arrow, whole, dtype, sizes):
    """This rank's rows of ``whole`` through an arrow whose left is split over dim 0, or whole."""
    mesh = Mesh(cp=2)
    x = torch.tensor(whole, dtype=dtype)
    if "@cp" in arrow.split("->")[0]:
        x = x.chunk(2)[mesh.rank]
    y = reshard(x, arrow, mesh, **sizes)
    with torch.no_grad():
        quiet = reshard(x, arrow, mesh, **sizes)
    assert torch.equal(y, quiet) and not y.requires_grad and y.dtype == dtype
    return y.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("arrow", "right"),
    [
        ("t@cp d -> t d", [[[1, 2], [3, 4], [5, 6], [7, 8]]] * 2),
        ("t@cp d -> t d@cp", [[[1], [3], [5], [7]], [[2], [4], [6], [8]]]),
        ("t@cp ... -> t@cp.zigzag ...", [[[1, 2], [7, 8]], [[3, 4], [5, 6]]]),
        ("t d + cp -> t d", [[[2, 4], [6, 8], [10, 12], [14, 16]]] * 2),
        ("t d + cp -> t d@cp", [[[2], [6], [10], [14]], [[4], [8], [12], [16]]]),
    ],
)
def test_reshard_of_any_dtype(ranks, arrow, right, dtype):
    assert ranks(2).run(move, arrow, [[1, 2], [3, 4], [5, 6], [7, 8]], dtype, {}) == right


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("dst", ["t d", "t d@cp", "t@cp.zigzag d"])
def test_reshard_of_nothing_stays_in_the_graph(ranks, shape, dst):
    for shapes, graph in ranks(2).run(empty, shape, f"t@cp d -> {dst}"):
        assert shapes[0] == shapes[1] and graph


def empty(shape, arrow):
    mesh = Mesh(cp=2)
    rows = [-(-shape[0] // 2), shape[0] // 2][mesh.rank]
    x = torch.ones(rows, shape[1], requires_grad=True)
    y = reshard(x, arrow, mesh, t=shape[0], d=shape[1])
    y.sum().backward()
    return (x.shape, x.grad.shape), y.requires_grad


def leave_input():
    x = torch.full((3,), 1.0 + dist.get_rank())
    y = all_reduce(x, dist.group.WORLD)
    return x.tolist(), y.tolist()


def with_a_tangent():
    x = torch.ones(2)
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, as it loads its derivatives
        dual = forward_ad.make_dual(x, x)
        with pytest.raises((NotImplementedError, RuntimeError)):
            reshard(dual, "s@cp -> s", Mesh(cp=2))


def test_tangents_are_refused(ranks):
    """There is no forward-mode derivative, and none is left out in silence."""
    ranks(2).run(with_a_tangent)


def test_all_reduce_leaves_its_input(ranks):
    assert ranks(2).run(leave_input) == [([1.0] * 3, [3.0] * 3), ([2.0] * 3, [3.0] * 3)]


def contradict():
    mesh = Mesh(cp=2)
    with pytest.raises(LayoutError) as error:
        reshard(torch.zeros(3, 2), "t@cp d -> t d", mesh, t=10)
    dist.barrier()
    return str(error.value).split("\n")[:3]


def test_reshard_refuses_a_contradicting_size_before_it_sends(ranks):
    for rank, lines in enumerate(ranks(2).run(contradict)):
        assert lines == [
            f"the tensor of rank {rank} has shape (3, 2), the layout gives it (5, 2)",
            "  t@cp d -> t d",
            "  ^^^^",
        ]


def keep_order():
    """Many exchanges in flight order through one group: none takes another's messages."""
    mesh = Mesh(cp=2)
    blocks = [torch.full((n % 3 + 1, 2), float(10 * n + mesh.rank)) for n in range(30)]
    whole = [reshard(block, "t@cp d -> t d", mesh) for block in blocks]
    return [x[:, 0].unique().tolist() for x in whole]


def test_exchanges_keep_their_order(ranks):
    assert ranks(2).run(keep_order) == [[[10.0 * n, 10.0 * n + 1] for n in range(30)]] * 2


def launch_both_ways(sizes):
    """Rank r sends ``sizes[r][k]`` rows to rank k, by messages and by one collective."""
    rank, group = dist.get_rank(), dist.group.WORLD
    outgoing = {k: torch.full((3, n), 10.0 * rank + k).T for k, n in enumerate(sizes[rank])}
    landing = Landing({k: (row[rank], 3) for k, row in enumerate(sizes)}, outgoing[rank])
    ways = [way(outgoing, landing, group).wait() for way in (launch_messages, launch_single)]
    return [[(part.shape, part.unique().tolist()) for part in parts] for parts in ways]


def test_both_all_to_alls_deliver_the_same(ranks):
    sizes = [[2, 0, 1, 3], [0, 1, 0, 0], [5, 0, 0, 1], [1, 2, 0, 0]]
    for rank, ways in enumerate(ranks(4).run(launch_both_ways, sizes)):
        right = [
            (torch.Size([row[rank], 3]), [10.0 * k + rank] if row[rank] else [])
            for k, row in enumerate(sizes)
        ]
        assert ways == [right, right]


def launch_even():
    """A gather and a sum as devices do them, and by messages, forward and backward."""
    rank, group = dist.get_rank(), dist.group.WORLD
    own = torch.arange(6.0).reshape(2, 3) + 10 * rank
    gathered = Landing(dict.fromkeys(range(4), (2, 3)), own, lane=7)
    everywhere = dict.fromkeys(range(4), own)
    ways = [way(everywhere, gathered, group).wait() for way in (launch_gather, launch_messages)]
    terms = {k: own * (k + 1) for k in range(4)}
    summed = launch_scatter(terms, Landing(dict.fromkeys(range(4), (2, 3)), own, lane=7), group)
    summed.wait()
    return ways, summed.whole


def test_even_collectives_deliver_what_messages_do(ranks):
    whole = torch.arange(6.0).reshape(2, 3)
    for rank, ((gathered, messages), total) in enumerate(ranks(4).run(launch_even)):
        for k in range(4):
            assert torch.equal(gathered[k], whole + 10 * k)
            assert torch.equal(messages[k], whole + 10 * k)
        assert torch.equal(total, (rank + 1) * (4 * whole + 60))


def even_in_another_order():
    group, me = dist.group.WORLD, dist.get_rank()
    own = torch.arange(3.0)
    faults = []
    for launch, shapes in ((launch_gather, {0: (3,), 1: (3,)}), (launch_scatter, {0: (3,), 1: (3,)})):
        landing = Landing(shapes, own, lane=2 + 2 * me)
        with pytest.raises(RuntimeError) as error:
            launch(dict.fromkeys(range(2), own), landing, group).wait()
        faults.append(str(error.value))
    return faults


def test_even_collectives_of_other_moves_are_refused(ranks):
    text = "ranks came to their moves in different orders; wait in one order on all ranks"
    assert ranks(2).run(even_in_another_order) == [[text] * 2] * 2


@pytest.mark.parametrize(
    ("device", "dtype", "even", "way"),
    [
        ("cpu", torch.float32, Even.GATHER, Way.MESSAGES),
        ("cpu", torch.float32, None, Way.MESSAGES),
        ("cuda", torch.bfloat16, Even.GATHER, Way.GATHER),
        ("npu", torch.int64, Even.GATHER, Way.GATHER),
        ("cuda", torch.float32, Even.SCATTER, Way.SCATTER),
        ("cuda", torch.bfloat16, Even.SCATTER, Way.ALL_TO_ALL),
        ("cuda", torch.float64, Even.SCATTER, Way.ALL_TO_ALL),
        ("cuda", torch.float32, None, Way.ALL_TO_ALL),
    ],
)
def test_devices_have_their_own_ways(device, dtype, even, way):
    assert way_of(device, dtype, even) is way


@pytest.mark.parametrize(
    ("arrow", "size", "even"),
    [
        ("t@cp h -> t h", 8, Even.GATHER),
        ("t@cp.zigzag h -> t h", 16, Even.GATHER),
        ("t h + cp -> t@cp h", 8, Even.SCATTER),
        ("t@cp h -> t h", 9, None),
        ("t h + cp -> t@cp h", 9, None),
        ("t@cp h -> t h@cp", 8, None),
        ("t@cp h -> t@cp.zigzag h", 16, None),
    ],
)
def test_what_is_even_is_even_on_all_ranks(arrow, size, even):
    mesh = MeshShape(cp=4)
    program = transition(*arrow.split(" -> "), mesh)
    layouts = program.layouts(mesh, t=size, h=4)
    for rank in range(4):
        moves = route(program.steps[0], *layouts[:2], rank).moves
        assert moves.even is even
        assert moves.reverse.even is (even and even.reverse)
