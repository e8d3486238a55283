"""Sums of half precision: in fp32, in group order, rounded once, the same at every position."""

import itertools

import pytest
import torch
import torch.distributed as dist

from vlshard import Mesh, reshard, start

HALVES = [torch.bfloat16, torch.float16]
# Terms by rank, and their sum in each dtype, by hand: 256 + 3 = 259 lies between 258 and 260 in
# bf16 (ties go to the even one, 260); 2048 + 3 = 2051 between 2050 and 2052 in fp16 (2052); fp16
# ends at 65,504.
TERMS = {
    torch.bfloat16: {(256, 1, 1, 1): 260, (256, 0.5, 0.5, 0): 256, (1, -(2.0**100), 2.0**100, 0): 0},
    torch.float16: {(2048, 1, 1, 1): 2052, (60000, 60000, -60000, 0): 60000},
}


def ways(x, mesh):
    """The sum, whole, by reshard and in flight, and its parts put together again."""
    yield reshard(x, "s + cp -> s", mesh)
    yield start(x, "s + cp -> s", mesh).wait()
    yield reshard(reshard(x, "s + cp -> s@cp", mesh), "s@cp -> s", mesh, s=len(x))
    yield reshard(start(x, "s + cp -> s@cp", mesh).wait(), "s@cp -> s", mesh, s=len(x))


def all_positions(dtype, size):
    """Sums wherever the large term is, in values and in gradients."""
    mesh = Mesh(cp=4)
    for terms, total in TERMS[dtype].items():
        for order in itertools.permutations(terms):
            if total == 0 and order[0] != 1:
                continue  # in fp32, too, that sum depends on the order, which is the group's
            x = torch.full((size,), order[mesh.rank], dtype=dtype)
            for y in ways(x, mesh):
                assert y.dtype == dtype and y.tolist() == [total] * size, (order, y)
        for terms_at in (terms, terms[::-1]):
            x = torch.zeros(size, dtype=dtype, requires_grad=True)
            for y in ways(x, mesh):
                (grad,) = torch.autograd.grad(y, x, torch.full_like(y, terms_at[mesh.rank]))
                want = total if terms_at == terms or total else None
                assert want is None or grad.tolist() == [want] * size, (terms_at, grad)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_sums_are_rounded_once_wherever_the_terms_are(ranks, dtype):
    ranks(4).run(all_positions, dtype, 8)


def eight_bits():
    """Sums of 8 bits are taken in fp32 too: 16 + 1 + 1 + 1 = 19 lies between 18 and 20."""
    mesh = Mesh(cp=4)
    for dtype, total in ((torch.float8_e4m3fn, 20), (torch.float8_e5m2, 20)):
        for size in (8, 5, 1, 0):
            x = torch.full((size,), 16.0 if mesh.rank == 1 else 1.0).to(dtype)
            for y in ways(x, mesh):
                assert y.dtype == dtype and y.float().tolist() == [total] * size, (dtype, size)


def test_sums_of_eight_bits_are_rounded_once_too(ranks):
    ranks(4).run(eight_bits)


def odd_sizes():
    """Sizes that do not divide, none at all, several dims; the same bits on all ranks."""
    mesh, found = Mesh(cp=4), []
    generator = torch.Generator().manual_seed(mesh.rank)
    for shape in ((0,), (1,), (5,), (3, 0, 2), (3, 7), ()):
        for dtype in (*HALVES, torch.float32, torch.float64, torch.int64):
            x = (torch.randn(shape, generator=generator) * 100).to(dtype)
            terms = [torch.empty_like(x) for _ in range(4)]
            dist.all_gather(terms, x)
            wide = torch.float32 if dtype in HALVES else dtype
            right = (terms[0].to(wide) + terms[1] + terms[2] + terms[3]).to(dtype)
            arrow = " ".join("abc"[: x.ndim])
            flown = start(x, f"{arrow} + cp -> {arrow}", mesh).wait()
            summed = reshard(x, f"{arrow} + cp -> {arrow}", mesh)
            assert torch.equal(flown, right), (shape, dtype)
            assert dtype.itemsize > 2 or torch.equal(summed, right), (shape, dtype)
            found.append(summed.tolist())
    return found


def test_half_sums_of_any_size_are_the_same_bits_on_all_ranks(ranks):
    first, *others = ranks(4).run(odd_sizes)
    assert all(found == first for found in others)
