"""DTensors hold what the layout says, uneven and empty ranks too, and gradients follow the rule."""

import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vlshard import LayoutError, Mesh, Sharded, from_dtensor, layout, to_dtensor, use_mesh

CASES = [
    ("b@dp s@cp m", {"b": 3, "s": 5, "m": 2}),
    ("s@dp@cp m", {"s": 7, "m": 3}),
    ("s@dp@cp m", {"s": 1, "m": 2}),
    ("b m@cp", {"b": 4, "m": 3}),
    ("b s", {"b": 2, "s": 3}),
    ("b@cp m + dp", {"b": 5, "m": 2}),
    ("b m + dp cp", {"b": 3, "m": 2}),
    ("(h@dp d)@cp m", {"h": 4, "d": 3, "m": 2}),
]


def whole(sizes, seed):
    """Distinct whole numbers, so that sums are exact."""
    count = int(np.prod(sizes))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return (order.double() + 1).reshape(sizes)


def part(x, where, rank):
    """What a rank holds of a tensor; of a pending sum, distinct terms of it."""
    held = x[np.ix_(*where.indices(rank))]
    pending = [str(axis) for axis in where.spec.pending]
    peers = where.mesh.peers(pending, rank)
    weights = torch.arange(1.0, len(peers) + 1).double()
    weights[-1] = 1 - weights[:-1].sum()
    return held * weights[peers.index(rank)]


def carry_out(text, sizes, mesh):
    """One rank: wrap, make whole, unwrap, take this rank's term of the loss, go back."""
    where = layout(text, mesh, **sizes)
    x = whole(where.shape, 1)
    mine = part(x, where, mesh.rank).requires_grad_()
    wrapped = to_dtensor(mine, text, mesh, **sizes)
    again = from_dtensor(wrapped, text)
    everywhere = wrapped.redistribute(placements=[Replicate()] * len(mesh.parts))
    weights = whole(where.shape, 2 + mesh.rank)
    (from_dtensor(everywhere) * weights).sum().backward()
    faults = []
    if not torch.equal(again, mine):
        faults.append("there and back")
    if not torch.equal(from_dtensor(everywhere), x):
        faults.append("made whole")
    if not where.spec.pending:
        theirs = distribute_tensor(x, wrapped.device_mesh, wrapped.placements)
        if not torch.equal(theirs.to_local(), mine) or theirs.stride() != wrapped.stride():
            faults.append("as DTensor cuts")
    return mine.grad, faults


def run_cases(cases):
    mesh = Mesh(dp=2, cp=2)
    return [carry_out(text, sizes, mesh) for text, sizes in cases]


def expected_gradient(where, rank, world):
    """All ranks' weights; a rank that shares a value with others has a term of its sum."""
    return sum(whole(where.shape, 2 + r) for r in range(world))[np.ix_(*where.indices(rank))]


@pytest.mark.timeout(120)
def test_tensors_go_to_dtensor_and_back_with_their_gradients(ranks):
    answers = ranks(4).run(run_cases, CASES, timeout=60)
    mesh = Mesh(dp=2, cp=2)
    for i, (text, sizes) in enumerate(CASES):
        where = layout(text, mesh, **sizes)
        gradients = [answer[i][0] for answer in answers]
        shared = [axis for axis in mesh.parts if axis not in where.axes]
        for rank in range(4):
            assert answers[rank][i][1] == [], text
            terms = [gradients[peer] for peer in mesh.peers(shared, rank)]
            assert torch.equal(sum(terms), expected_gradient(where, rank, 4)), (text, rank)


def run_split_axes():
    mesh = Mesh(cp={"ring": 2, "ulysses": 2})
    rank = mesh.rank
    wrapped = to_dtensor(whole((8, 3), 1)[2 * rank : 2 * rank + 2], "s@cp.ring@cp.ulysses m", mesh)
    where = (wrapped.device_mesh.mesh_dim_names, wrapped.placements, tuple(wrapped.shape))
    return where, from_dtensor(wrapped.redistribute(placements=[Replicate(), Replicate()]))


@pytest.mark.timeout(120)
def test_parts_of_an_axis_are_dims_of_the_device_mesh(ranks):
    for where, full in ranks(4).run(run_split_axes, timeout=60):
        assert where == (("cp.ring", "cp.ulysses"), (Shard(0), Shard(0)), (8, 3))
        assert torch.equal(full, whole((8, 3), 1))


def refused(call):
    with pytest.raises(LayoutError) as error:
        call()
    return str(error.value)


def run_refusals():
    mesh = Mesh(dp=2, cp=2)
    x = torch.arange(6.0).reshape(3, 2)
    wrapped = to_dtensor(x, "s@cp m", mesh)
    nameless = DTensor.from_local(x, torch.distributed.init_device_mesh("cpu", (4,)), [Shard(0)])
    return [
        refused(lambda: to_dtensor(x, "s@cp m", mesh, s=8)),
        refused(lambda: to_dtensor(x, "s@(dp cp) m", mesh)),
        refused(lambda: from_dtensor(wrapped, "s@dp m")),
        refused(lambda: from_dtensor(nameless, "s@cp m")),
    ]


@pytest.mark.timeout(120)
def test_tensors_that_do_not_fit_are_refused(ranks):
    answers = ranks(4).run(run_refusals, timeout=60)
    assert answers[1] == [
        "the tensor of rank 1 has shape (3, 2), the layout gives it (4, 2)\n"
        "  s@cp m\n"
        "  ^^^^\n"
        "  a plain dim that is not even over its axes needs its global size",
        "DTensor cannot join axes into one cut, as '(dp cp)'\n"
        "  s@(dp cp) m\n"
        "   ^^^^^^^^\n"
        "  fix: '@dp@cp', cut after cut, is the same where 4 divides the size",
        "the DTensor is placed as dp:R cp:S(0)\n"
        "  s@dp m\n"
        "  ^^^^^^\n"
        "  the spec says dp:S(0) cp:R; redistribute moves it",
        "the mesh of the DTensor has no names, so no spec can speak of it\n"
        "  s@cp m\n"
        "  ^^^^^^\n"
        "  fix: give mesh_dim_names",
    ]


@jaxtyped(typechecker=beartype)
def scale(
    x: Sharded[Tensor, "float64 s@cp m"], w: Sharded[Tensor, " s"], y: Float[Tensor, " m"]
) -> None:
    return None


def run_annotations():
    mesh = Mesh(dp=2, cp=2)
    rows, width = torch.arange(7.0), torch.zeros(2)
    x = to_dtensor(
        part(whole((7, 2), 1), layout("s@cp m", mesh, s=7, m=2), mesh.rank), "s@cp m", mesh, s=7
    )
    scale(x, rows, width)
    with use_mesh(mesh):
        scale(x, rows, width)
        scale(x.to_local(), rows, width)
    texts = []
    for wrong, size in ((x.redistribute(placements=[Replicate()] * 2), rows), (x, rows[:6])):
        with pytest.raises(TypeCheckError) as error:
            scale(wrong, size, width)
        texts.append(str(error.value.__cause__.__cause__).split(", as ")[-1])
    return texts


@pytest.mark.timeout(120)
def test_annotated_dtensors_carry_the_placements(ranks):
    placed, sized = ranks(4).run(run_annotations, timeout=60)[3]
    assert placed.split("\n", 1)[1] == (
        "  float64 s@cp m\n"
        "          ^^^^ ^\n"
        "  placed as dp:R cp:R, expected dp:R cp:S(0)\n"
        "  no mesh is in use, so each dim is whole; with use_mesh(mesh) splits count."
    )
    assert sized.split("\n", 1)[1] == (
        "   s\n   ^\n  's' is 6, expected 7\n  sizes: s=7 ('x'), m=2 ('x')."
    )
