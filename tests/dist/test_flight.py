"""Tensors in flight between ranks: values, order of launches and waits, delays, refusals."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jaxtyping import config
from torch.utils.checkpoint import checkpoint

from tests.dist.events import recorded
from tests.dist.test_several_steps import DYNAMO_LOOKS
from tests.dense_moves import dense_moves
from vlshard import Mesh
from vlshard.comm.flight import start, start_rows
from vlshard.comm.reshard import reshard

ARROWS = [
    "t@cp h d -> t h@cp d",
    "t@cp h d -> t h d",
    "t h d + cp -> t h d",
    "t h d + cp -> t@cp h d",
    "t@cp.zigzag h d -> t h d",
    "t h d -> t@cp h d",
    "t@cp h d -> t@cp h d",
]


def local_part(arrow, mesh, scale=1.0):
    """Distinct rows of this rank, as the left side of an arrow has them (even over cp)."""
    rows = 8 // mesh.sizes["cp"] if "t@" in arrow.split("->")[0] else 8
    count = torch.arange(rows * 4 * 3, dtype=torch.float64) + 100 * mesh.rank
    return (count.sin() * scale).reshape(rows, 4, 3)


def both_ways(arrow):
    """Output and gradient by ``start`` and by ``reshard``, with and without autograd."""
    mesh = Mesh(cp=dist.get_world_size())
    found = []
    for way in (lambda x: reshard(x, arrow, mesh), lambda x: start(x, arrow, mesh).wait()):
        x = local_part(arrow, mesh).requires_grad_()
        y = way(x)
        y.backward((torch.arange(y.numel(), dtype=y.dtype) + mesh.rank).cos().view_as(y))
        with torch.no_grad():
            quiet = way(x)
        assert torch.equal(quiet, y), (quiet, y)
        assert quiet is x or not quiet.requires_grad
        found.append((y.detach(), x.grad))
    return found


@pytest.mark.parametrize("arrow", ARROWS)
def test_start_equals_reshard(ranks, arrow):
    for (y, gradient), (flown, flown_gradient) in ranks(4).run(both_ways, arrow):
        # torch's all-reduce adds four numbers below 1 in another order; all else is the same bits
        atol = 2 * 3 * 2**-53 * 4 if "+ cp -> t h d" in arrow else 0
        torch.testing.assert_close(flown, y, rtol=0, atol=atol)
        torch.testing.assert_close(flown_gradient, gradient, rtol=0, atol=atol)


def three_projections(flies, recompute, delay, steps=1):
    """k, v, q projected and sent, then used together, as attention does."""
    mesh = Mesh(cp=dist.get_world_size())
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(3, 3, generator=generator).double().requires_grad_() for _ in "kvq"]
    x = local_part("t@cp", mesh).requires_grad_()

    def block(x):
        arrow = "t@cp h d -> t h@cp d"
        if flies:
            k, v, q = [start(x @ w, arrow, mesh) for w in weights]
            k, v, q = k.wait(), v.wait(), q.wait()
        else:
            k, v, q = [reshard(x @ w, arrow, mesh) for w in weights]
        return (torch.einsum("thd,shd->hts", q, k).softmax(-1) @ v.transpose(0, 1)).sin()

    with recorded(delay) as events:
        for _ in range(steps):
            if recompute:
                out = checkpoint(block, x, use_reentrant=False, early_stop=False)
            else:
                out = block(x)
            out.square().sum().backward()
    return [out.detach(), x.grad, *(w.grad for w in weights)], events


def test_all_launches_come_before_the_first_wait_both_ways(ranks):
    once = ["launch"] * 3 + ["wait"] * 3
    for _, events in ranks(2).run(three_projections, True, False, 0.0):
        assert events == once * 2
    for _, events in ranks(2).run(three_projections, True, True, 0.0):
        assert events == once * 3  # forward, recompute, backward
    for _, events in ranks(2).run(three_projections, False, False, 0.0):
        assert events == ["launch", "wait"] * 6


def test_random_delays_change_nothing(ranks):
    expected = ranks(4).run(three_projections, False, False, 0.0, 6)
    found = ranks(4).run(three_projections, True, True, 0.004, 6)
    for (right, _), (flown, _) in zip(expected, found, strict=True):
        for a, b in zip(right, flown, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def one_consumer():
    x = torch.ones(2, 2, 3)
    pending = start(x, "t@cp h d -> t h@cp d", Mesh(cp=2))
    pending.wait()
    with pytest.raises(RuntimeError) as error:
        pending.wait()
    return str(error.value)


def test_a_second_wait_is_refused(ranks):
    assert ranks(2).run(one_consumer)[0] == (
        "this tensor has been waited for already: a Pending has one consumer; keep what wait() gave"
    )


def dropped():
    """Flights that nobody waits for, between moves of other values over the same group."""
    mesh = Mesh(cp=dist.get_world_size())
    x = torch.arange(8.0).reshape(4, 2) + 100 * mesh.rank
    arrow = "s@cp h -> s h@cp"
    want = reshard(x, arrow, mesh)
    for step in range(20):
        start(x + step + 1, arrow, mesh)
        other = start(x - step - 1, arrow, mesh)
        assert torch.equal(reshard(x, arrow, mesh), want)
        del other
    y = x.clone().requires_grad_()
    unused = start(y, arrow, mesh)
    start(y, arrow, mesh).wait().sum().backward()
    del unused
    assert torch.equal(y.grad, torch.ones_like(y))
    assert torch.equal(reshard(x, arrow, mesh), want)


def test_a_flight_that_nobody_waits_for_stands_in_nobodys_way(ranks):
    ranks(2).run(dropped, timeout=30)


def compiled():
    """Gradients of a compiled function whose value flies, beside those of the plain one."""
    mesh = Mesh(cp=dist.get_world_size())

    def flies(x):
        pending = start(x.sin(), "s@cp h -> s h@cp", mesh)
        other = x.square().sum()
        return (pending.wait() ** 2).sum() * 3 + other

    found = []
    config.update("jaxtyping_disable", True)  # Dynamo cannot trace the checks
    try:
        for function in (flies, torch.compile(flies, backend="aot_eager")):
            x = (torch.arange(8.0).reshape(4, 2) + mesh.rank).requires_grad_()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", DYNAMO_LOOKS)
                function(x).backward()
            found.append(x.grad)
    finally:
        config.update("jaxtyping_disable", False)
        torch._dynamo.reset()
    torch.testing.assert_close(found[1], found[0])


def test_a_compiled_function_breaks_its_graph_at_a_flight(ranks):
    ranks(2).run(compiled, timeout=60)


def twice():
    x = torch.ones(2, 2, 3, requires_grad=True)
    y = start(x, "t@cp h d -> t h@cp d", Mesh(cp=2)).wait()
    with pytest.raises(RuntimeError, match="a tensor in flight is differentiable once only"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    dist.barrier()


def test_a_second_derivative_is_refused(ranks):
    ranks(2).run(twice)


def no_rows(dtype):
    """Rank 1 holds nothing, and rank 0 wants nothing."""
    rank = dist.get_rank()
    have, want = [np.arange(3), np.arange(0)], [np.arange(0), np.array([2, 0, 1])]
    x = torch.arange(3.0 if rank == 0 else 0.0)[:, None].expand(-1, 2).to(dtype).clone()
    x.requires_grad_()
    pending = start_rows(x, (0, 0), dense_moves(have, want, rank), dist.group.WORLD)
    y = pending.then(lambda y: 2 * y).wait()
    y.sum().backward()
    return y.detach()[:, 0].tolist(), x.grad[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_without_rows_take_part(ranks, dtype):
    assert ranks(2).run(no_rows, dtype) == [([], [2.0] * 3), ([4.0, 0.0, 2.0], [])]


def shared_gradient():
    """The gradient that leaves is also a leaf's, which grows at once: nobody sees the other."""
    mesh = Mesh(cp=2)
    x, leaf = (torch.ones(2, 2, 3, requires_grad=True) for _ in "ab")
    with recorded(0.01):
        for _ in range(2):
            (reshard_free(x, mesh) + leaf).backward(torch.full((2, 2, 3), 2.0))
    return x.grad.unique().tolist(), leaf.grad.unique().tolist()


def reshard_free(x, mesh):
    return start(x, "t@cp h d -> t h@cp d", mesh).wait().reshape(2, 2, 3)


def test_a_gradient_in_flight_is_nobody_elses(ranks):
    assert ranks(2).run(shared_gradient) == [([4.0], [4.0])] * 2
