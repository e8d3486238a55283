"""Attention in blocks: merging, the plain kernel beside the device's own, which kernel is taken."""

import pytest
import torch

from vlshard.attention.blocks import (
    Part,
    block_attention,
    block_gradients,
    block_kernel,
    merge,
    written_out,
    written_out_gradients,
)


def draw(*lengths, dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, n, 8, generator=g, dtype=torch.float64).to(dtype) for n in lengths]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("nq", "nk", "causal"), [(5, 7, False), (6, 6, True), (1, 1, True)])
def test_the_plain_kernel_equals_the_cpu_kernel(nq, nk, causal, dtype):
    q, k, v, grad = draw(nq, nk, nk, nq, dtype=dtype)
    close = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]  # rounding
    own, plain = block_attention(q, k, v, causal), written_out(q, k, v, causal)
    own_grads = block_gradients(grad, q, k, v, own, causal)
    plain_grads = written_out_gradients(grad, q, k, v, own, causal)
    for a, b in zip((*own, *own_grads), (*plain, *plain_grads), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=close, atol=close)


def test_blocks_merge_to_the_whole():
    q, k, v = draw(5, 9, 9)
    whole = written_out(q, k, v, False)
    a, b = (written_out(q, k[:, :, cut], v[:, :, cut], False) for cut in (slice(4), slice(4, 9)))
    for found, expected in zip(merge(*a, *b), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_an_empty_block_changes_nothing():
    empty = Part(torch.zeros(3, 2), torch.full((3,), -torch.inf))
    full = Part(torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([1e5, -1e5, 0.0]))
    for one, other in ((empty, full), (full, empty)):
        found = merge(*one, *other)
        assert torch.equal(found.out, full.out) and torch.equal(found.lse, full.lse)
    nothing = merge(*empty, *empty)
    assert torch.equal(nothing.out, empty.out) and torch.equal(nothing.lse, empty.lse)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "kernel"),
    [
        ("cpu", torch.float32, 8, "cpu flash"),
        ("cuda", torch.bfloat16, 128, "cuda flash"),
        ("cuda", torch.bfloat16, 12, "written out"),
        ("cuda", torch.float32, 128, "written out"),
        ("npu", torch.bfloat16, 128, "written out"),
    ],
)
def test_kernel_of_a_device(device, dtype, width, kernel):
    assert block_kernel(device, dtype, width) == kernel
