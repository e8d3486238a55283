"""Segmented attention against attention written out in fp64."""

import pytest
import torch

from vlshard.attention.runs import Runs, segmented_attention
from vlshard.plan.boundaries import local_boundaries


def written_out(q, k, v, runs):
    """Softmax(q k / sqrt(d)) v, run by run and query by query."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    out = torch.zeros_like(q)
    table = zip(runs.q_starts, runs.q_lengths, runs.k_starts, runs.k_lengths, strict=True)
    for q0, nq, k0, nk in table:
        for i in range(nq):
            seen = slice(k0, k0 + (i + 1 + nk - nq if runs.causal else nk))
            scores = torch.einsum("hd,khd->hk", q[q0 + i], k[seen]) / q.shape[-1] ** 0.5
            out[q0 + i] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen])
    return out


CASES = {
    "segments of mixed length": (Runs.segments([3, 5, 3, 1, 5]), 4, 4),
    "equal segments, no reorder": (Runs.segments([4, 4, 4]), 4, 4),
    "causal rows, grouped heads": (Runs.segments([6, 2, 6], causal=True), 4, 2),
    "part of the queries, keys further on": (Runs((0, 3), (3, 2), (4, 0), (5, 4)), 2, 2),
    "causal prefix": (Runs((0, 2, 6), (2, 4, 2), (0, 0, 0), (4, 8, 9), causal=True), 4, 1),
    "a run without queries": (Runs((0, 0), (0, 2), (0, 1), (3, 4)), 2, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_equals_fp64_forward_and_backward(case):
    runs, heads, kv = CASES[case]
    g = torch.Generator().manual_seed(1)
    keys = max(k + n for k, n in zip(runs.k_starts, runs.k_lengths, strict=True))
    shapes = [(sum(runs.q_lengths), heads, 8), (keys, kv, 8), (keys, kv, 8)]
    inputs = [torch.randn(s, generator=g).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = segmented_attention(*inputs, runs), written_out(*exact, runs)
    seed = torch.randn(out.shape, generator=g)
    out.backward(seed)
    expected.backward(seed.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)  # fp32 rounding
    for x, e in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), e.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keys", [0, 3])
def test_attention_without_queries_gives_zero_gradients(keys):
    q = torch.empty(0, 4, 8, requires_grad=True)
    k, v = (torch.randn(keys, 2, 8, requires_grad=True) for _ in range(2))
    segmented_attention(q, k, v, Runs((), (), (), ())).sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]
    assert all(bool((x.grad == 0).all()) for x in (q, k, v))


def test_attention_refuses_runs_that_miss_rows():
    x = torch.randn(5, 2, 8)
    with pytest.raises(ValueError, match="runs of 4 queries for 5 rows of q"):
        segmented_attention(x, x, x, Runs.segments([4]))


def test_local_text_attention_is_causal_per_row():
    x = torch.randn(3, 5, 2, 8)
    at = local_boundaries()
    out = at.attend("text", *(at.start(f"text.{n}", x) for n in "qkv"))
    expected = written_out(
        *(x.flatten(0, 1).double() for _ in "qkv"), Runs.segments([5] * 3, causal=True)
    )
    torch.testing.assert_close(out.flatten(0, 1).double(), expected, rtol=1e-5, atol=1e-5)


def test_queries_without_keys_between_others_are_zero():
    runs = Runs((0, 2, 5), (2, 3, 1), (0, 2, 2), (2, 0, 3))
    draw = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(n, 2, 8, generator=draw, requires_grad=True) for n in (6, 5, 5))
    out = segmented_attention(q, k, v, runs)
    out.square().sum().backward()
    assert torch.equal(out[2:5], torch.zeros(3, 2, 8))
    assert torch.equal(q.grad[2:5], torch.zeros(3, 2, 8))
    for rows, keys in ((slice(0, 2), slice(0, 2)), (slice(5, 6), slice(2, 5))):
        only = Runs((0,), (rows.stop - rows.start,), (0,), (keys.stop - keys.start,))
        alone = segmented_attention(q[rows], k[keys], v[keys], only)
        torch.testing.assert_close(out[rows], alone)
