"""Attention in one call against dense attention in fp64: rows, packs, and heads split besides."""

import re

import pytest
import torch

from vlshard import Mesh, Packing, attend, gather, hybrid, reshard, ring, ulysses

FOUR = {"dp": 2, "cp": 2}
PARTS = {"cp": {"ring": 2, "ulysses": 2}}
ROWS = ((4, 12), [12] * 4, {})
SAMPLES = ((24,), [7, 1, 12, 4], {"smp": Packing([7, 1, 12, 4])})
CLIPS = ((2, 16), [6, 2, 8] * 2, {"clip": Packing([6, 2, 8], unit=2)})
# Mesh, layout, mode; sizes of the rows, lengths of the sequences, sizes that are not even.
CASES = [
    (FOUR, "b@dp s@cp h d", ulysses("cp"), *ROWS),
    (FOUR, "b@dp s@cp.zigzag h d", gather("cp", overlap=True), *ROWS),
    (FOUR, "b@dp s@cp.zigzag h d", ring("cp"), *ROWS),
    (FOUR, "b@(dp cp) s h d", None, *ROWS),
    (FOUR, "... s@cp h@dp d", ring("cp", overlap=True), *ROWS),
    (FOUR, "b s@(dp cp) h d", gather("dp cp"), (3, 10), [10] * 3, {"s": 10}),
    (FOUR, "b (t s@cp)@dp h d", gather("dp cp"), *ROWS[:2], {"t": 3, "s": 4}),
    (PARTS, "b s@cp h d", hybrid(ulysses="cp.ulysses", ring="cp.ring"), *ROWS),
    (FOUR, "(smp s)@(dp cp) h d", ulysses("dp cp", overlap=True), *SAMPLES),
    (FOUR, "(smp@dp s@cp.zigzag) h d", gather("cp"), *SAMPLES),
    (FOUR, "(smp@(dp cp).balance s) h d", None, *SAMPLES),
    (FOUR, "b@dp (clip s)@cp h d", ring("cp"), *CLIPS),
]


def dense(q, k, v, lengths, causal):
    """Masked attention over all rows, those of one sequence after those of another."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = number[:, None] == number[None]
    seen = seen.tril() if causal else seen
    q, k, v = (x.flatten(0, -3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def off(axes, text, mode, rows, lengths, sizes, causal):
    """How far this rank's part of the result and of the gradients is from dense attention's."""
    mesh, draw = Mesh(**axes), torch.Generator().manual_seed(7)
    arrow = re.sub(r"@(\([^)]+\)|\w)[.\w]*", "", text) + " -> " + text
    whole = [
        torch.randn(*rows, heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2, 4)
    ]
    q, k, v, grad = whole
    parts = [reshard(x, arrow, mesh, **sizes).clone().requires_grad_() for x in whole]
    found = attend(*parts[:3], text, mesh, mode, causal=causal, **sizes)
    assert found.shape == parts[0].shape
    gradients = torch.autograd.grad(found, parts[:3], parts[3].detach())

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = dense(*inputs, lengths, causal).view(q.shape)
    pairs = zip(
        (found.detach(), *gradients),
        (wanted.detach(), *torch.autograd.grad(wanted, inputs, grad)),
        strict=True,
    )
    differences = [a - reshard(b, arrow, mesh, **sizes) for a, b in pairs]
    return max(float(x.abs().max()) if x.numel() else 0.0 for x in differences)


def all_off():
    """The worst difference of each case, both ways and causally."""
    return [off(*case, causal) for case in CASES for causal in (False, True)]


def test_attention_in_parts_equals_dense_attention(ranks):
    for found in ranks(4).run(all_off, timeout=120):
        assert max(found) < 1e-13, found  # fp64 rounding
