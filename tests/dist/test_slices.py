"""Rows behind other dims travel slice by slice where slices are large, and arrive all the same."""

import numpy as np
import pytest
import torch

from vlshard import Mesh, reshard
from vlshard.comm import transport
from vlshard.comm.collectives import LARGE_SUM

# Arrow, shape of the whole, and the messages that a rank of two sends one way and back.
CASES = {
    "gather": ("b s@cp m -> b s m", (3, 4, 5), (3, 3)),
    "uneven": ("b s@cp m -> b s m", (3, 5, 5), (3, 3)),
    "sum of parts": ("b s m + cp -> b s@cp m", (3, 4, 5), (3, 3)),
    "another dim": ("b s@cp m -> b s m@cp", (3, 4, 6), (1, 1)),
    "first dim": ("b@cp s m -> b s m", (4, 3, 5), (1, 1)),
    "two dims before": ("a b s@cp -> a b s", (2, 3, 4), (6, 6)),
    "too many slices": ("b s@cp m -> b s m", (17, 4, 2), (1, 1)),
    "rows apart": ("b s@cp.zigzag m -> b s m", (3, 8, 5), (3, 3)),
    "nothing": ("b s@cp m -> b s m", (3, 0, 5), ()),
}


def both_ways(arrow, shape, limit):
    """Result and gradient with slices of so many bytes and more, and the messages sent."""
    mesh, counts, post = Mesh(cp=2), [], transport.post
    x = whole(shape) * (mesh.rank + 1 if "+" in arrow else 1)
    dim = next((i for i, d in enumerate(arrow.split(" -> ")[0].split()) if "@" in d), None)
    if dim is not None:
        if "zigzag" in arrow:
            blocks = x.chunk(4, dim)
            x = torch.cat([blocks[mesh.rank], blocks[3 - mesh.rank]], dim)
        else:
            rows = -(-shape[dim] // 2)
            x = x.split([rows, shape[dim] - rows], dim)[mesh.rank]
    x = x.detach().requires_grad_()

    def noted(outgoing, *rest):
        counts.append(sum(one.numel() > 0 for _, one in outgoing))
        return post(outgoing, *rest)

    kept, transport.SLICE, transport.post = transport.SLICE, limit, noted
    try:
        sizes = dict(zip(arrow.split(" -> ")[1].replace("@cp", "").split(), shape, strict=True))
        y = reshard(x, arrow, mesh, **sizes)
        y.backward(whole(y.shape) * (mesh.rank + 3))
    finally:
        transport.SLICE, transport.post = kept, post
    return y.detach(), x.grad, tuple(counts)


def whole(shape):
    """Distinct numbers."""
    return torch.arange(float(np.prod(shape))).reshape(shape)


@pytest.mark.parametrize("name", CASES)
def test_slices_arrive_as_what_is_sent_at_once(ranks, name):
    arrow, shape, messages = CASES[name]
    plain = ranks(2).run(both_ways, arrow, shape, 1 << 30)
    sliced = ranks(2).run(both_ways, arrow, shape, 1)
    for (y, gradient, once), (y_sliced, gradient_sliced, counts) in zip(plain, sliced, strict=True):
        assert torch.equal(y, y_sliced) and torch.equal(gradient, gradient_sliced)
        assert once == tuple(min(n, 1) for n in messages) and counts == messages
    if name == "gather":
        assert all(torch.equal(y, whole(shape)) for y, *_ in sliced)
        assert torch.equal(sliced[1][1], 7 * whole(shape)[:, 2:])
    if name == "sum of parts":
        assert torch.equal(sliced[1][0], 3 * whole(shape)[:, 2:])


def large_sums(numbers):
    """A sum that is large enough to be taken in parts, and its gradient, bit for bit."""
    mesh = Mesh(cp=4)
    draw = torch.Generator().manual_seed(0)
    terms = torch.randn(4, numbers, generator=draw)
    x = terms[mesh.rank].clone().requires_grad_()
    y = reshard(x, "s + cp -> s", mesh)
    y.backward(terms[mesh.rank])
    in_order = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    assert torch.equal(y, in_order) and torch.equal(x.grad, in_order)
    assert torch.equal(x, terms[mesh.rank])


@pytest.mark.parametrize("more", [0, 1, 3])
def test_large_sums_are_taken_in_group_order_on_all_ranks(ranks, more):
    ranks(4).run(large_sums, LARGE_SUM // 4 + more)
