"""Layouts and programs against brute force, forward and backward."""

import random
from functools import lru_cache
from math import lcm

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.oracle import Case, Cut, Dim, Size, Spec
from vlshard.language.layout import layout
from vlshard.comm.mesh import Mesh
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.programs.program import Program
from vlshard.comm.reshard import lower, reshard
from vlshard.language.spec import arrow, spec
from vlshard.programs.transition import transition

MESHES = {"cp2": {"cp": 2}, "dp2": {"dp": 2}, "cp4": {"cp": 4}, "dp2cp2": {"dp": 2, "cp": 2}}
KINDS = ("plain", "pack", "fused", "plain plain", "pack plain", "fused plain", "pack fused")
THREE = ("plain plain plain", "pack plain plain", "plain pack fused")
HOME = (1, 10, 3, 4, 8, 7, 2, 9)  # at home with 2, 4 or 8 ranks: modulo
SIZES = {
    "plain": [Size((1,) * 7), Size((1,) * 3), Size((1,) * 8), Size(())],
    "pack": [
        Size((8, 4, 12, 0, 4), unit=4),
        Size((4, 2, 2, 6), unit=2),
        Size((3, 1, 5, 2), unit=1),
    ],
    "fused": [Size((4, 4)), Size((8, 4))],
}
DRAWN, DRAWN_OF_THREE = 24, 100


def sizes_of(src, dst, mesh, seed):
    """Sizes for the dims: uneven ones, ones that leave ranks empty, sometimes no rows at all."""
    found = []
    for i, dim in enumerate(src.dims):
        size = SIZES[dim.kind][(seed // 3**i) % len(SIZES[dim.kind])]
        cuts = [cut for side in (src, dst) for cut in side.dims[i].cuts]
        homes = lcm(*(oracle.ranks_along(c.axes, mesh) for c in cuts if c.order == "home"))
        home = tuple(HOME[k % len(HOME)] % homes for k in range(len(size.lengths)))
        found.append(size._replace(home=home, homes=homes))
    return tuple(found)


@lru_cache
def specs_of(kinds, axes):
    return oracle.specs_of(kinds.split(), axes)


def all_pairs(kinds, mesh):
    """All pairs of specs of such dims whose pending sums may be."""
    specs = specs_of(kinds, tuple(mesh))
    return [(a, b) for a in specs for b in specs if {*b.pending} <= {*a.pending}]


def drawn_pairs(kinds, mesh, number, rng):
    """Some of these pairs."""
    specs, found = specs_of(kinds, tuple(mesh)), []
    while len(found) < number:
        src, dst = rng.choices(specs, k=2)
        if {*dst.pending} <= {*src.pending}:
            found.append((src, dst))
    return found


@lru_cache
def packing(size):
    return Packing(size.lengths, size.unit, size.home, homes=size.homes)


def named(case):
    """Sizes as the package takes them: who is at home where matters if either side says so."""
    found = {}
    for a, b, size in zip(case.src.dims, case.dst.dims, case.sizes, strict=True):
        if a.kind == "fused":
            found |= dict(zip("hd", size.lengths, strict=True))
        elif a.kind == "pack":
            found["img"] = packing(size)
        elif any(cut.order == "home" for cut in (*a.cuts, *b.cuts)):
            found[a.name] = packing(size)
        else:
            found[a.name] = len(size.lengths)
    return found


def program_of(case, mesh):
    src, dst = oracle.text_of(case.src), oracle.text_of(case.dst)
    return transition(src, dst, MeshShape(**mesh), **named(case))


def run_cases(mesh_sizes, cases, plans):
    """On a rank: each case's result, gradient and bytes sent forward and backward."""
    sent, mesh = [0], Mesh(**mesh_sizes)
    # From the class's own dict: what getattr gives would not bind to a group once put back.
    send, reduce = vars(dist.ProcessGroup)["send"], dist.all_reduce

    def counting(group, tensors, *where):
        sent[0] += sum(x.nbytes for x in tensors)
        return send(group, tensors, *where)

    def counting_sum(x, group=None, **options):
        ranks = group.size()
        sent[0] += -(-2 * (ranks - 1) * x.numel() // ranks) * x.itemsize
        return reduce(x, group=group, **options)

    dist.ProcessGroup.send, dist.all_reduce = counting, counting_sum
    try:
        return [run_case(*pair, mesh, sent) for pair in zip(cases, plans, strict=True)]
    finally:
        dist.ProcessGroup.send, dist.all_reduce = send, reduce


def run_case(case, plan, mesh, sent):
    sizes = dict(mesh.sizes)
    x = torch.from_numpy(oracle.input_of(case, sizes, mesh.rank))
    if case.seed % 2:
        x = x.movedim(0, -1).contiguous().movedim(-1, 0)  # other strides, same values
    x.requires_grad_()
    sent[0] = 0
    if plan is None:
        y = reshard(x, oracle.arrow_of(case), mesh, **named(case))
    else:  # planned once for all ranks
        steps, between = plan
        program = Program(*arrow(oracle.arrow_of(case)), mesh, steps, tuple(map(spec, between)))
        y = lower(program, mesh, named(case))(x)
    forward, sent[0] = sent[0], 0
    y.backward(torch.from_numpy(oracle.seed_of(case, sizes, mesh.rank)))
    return y.detach().numpy(), x.grad.numpy(), forward, sent[0]


def check_case(case, mesh, program, results):
    """Every rank's result, the gradients and the counted bytes are right."""
    for rank, (y, *_) in enumerate(results):
        right = oracle.output_of(case, mesh, rank)
        assert np.array_equal(y, right) and y.shape == right.shape, (str(program), case, rank)
    faults = oracle.gradient_faults(case, mesh, [gradient for _, gradient, *_ in results])
    assert not faults, str(program)
    rank = case.seed % len(results)  # every rank has its turns
    counted = program.bytes_sent(rank=rank, itemsize=8, **named(case))
    assert counted == tuple(results[rank][2:]), (str(program), case, rank)


def check_cases(ranks, mesh, cases, plan=True):
    cases = sorted(cases, key=lambda case: case.sizes)  # what is cached serves many cases
    programs = [program_of(case, mesh) for case in cases]
    plans = [(p.steps, tuple(map(str, p.between))) if plan else None for p in programs]
    by_rank = ranks(oracle.count(mesh)).run(run_cases, mesh, cases, plans, timeout=900)
    for case, program, *results in zip(cases, programs, *by_rank, strict=True):
        check_case(case, mesh, program, results)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("kind", SIZES)
def test_layout_holds_what_the_oracle_says(mesh, kind):
    for seed, spec in enumerate(oracle.specs_of([kind], tuple(mesh))):
        case = Case(spec, spec, sizes_of(spec, spec, mesh, seed), seed)
        got = layout(oracle.text_of(spec), MeshShape(**mesh), **named(case))
        for rank in range(oracle.count(mesh)):
            (right,) = oracle.rows_of(spec, case.sizes, mesh, rank)
            assert np.array_equal(got.indices(rank)[0], right), (case, rank)
            assert got.local_shape(rank) == (right.size,)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("kinds", KINDS)
def test_pairs_of_specs(ranks, mesh, kinds, pytestconfig):
    """Pairs drawn from all; ``make parity`` passes ``--all-pairs`` and carries out each."""
    rng = random.Random(f"{kinds} {mesh}")
    every = pytestconfig.getoption("--all-pairs")
    pairs = all_pairs(kinds, mesh) if every else drawn_pairs(kinds, mesh, DRAWN, rng)
    cases = [
        Case(src, dst, sizes_of(src, dst, mesh, rng.randrange(900)), seed)
        for seed, (src, dst) in enumerate(pairs)
    ]
    check_cases(ranks, mesh, cases)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds", THREE)
def test_random_pairs_of_three_dims(ranks, kinds):
    mesh, rng = MESHES["dp2cp2"], random.Random(kinds)
    pairs = drawn_pairs(kinds, mesh, DRAWN_OF_THREE // len(THREE), rng)
    cases = [
        Case(src, dst, sizes_of(src, dst, mesh, rng.randrange(900)), seed)
        for seed, (src, dst) in enumerate(pairs)
    ]
    check_cases(ranks, mesh, cases, plan=False)


def plain(name, *cuts):
    return Dim("plain", name, tuple(Cut("", (axis,), *order) for axis, *order in cuts))


def pack(*cuts):
    return Dim("pack", "", tuple(Cut(slot, (axis,), *order) for slot, axis, *order in cuts))


def both_ways(src, dst):
    return [(Spec(src), Spec(dst)), (Spec(dst), Spec(src))]


HOME_CUT = ("img", "dp", "home")
WHOLE = (pack(HOME_CUT), plain("h", ("cp",)), plain("d"))
PLANNED = [
    *both_ways((pack(HOME_CUT, ("all", "cp")), plain("h"), plain("d")), WHOLE),
    *both_ways((pack(HOME_CUT, ("s", "cp")), plain("h"), plain("d")), WHOLE),
    *both_ways((pack(HOME_CUT, ("img", "cp")), plain("h"), plain("d")), WHOLE),
    *both_ways(
        (plain("b", ("dp", "home")), plain("s", ("cp", "zigzag")), plain("h"), plain("d")),
        (plain("b", ("dp", "home")), plain("s"), plain("h", ("cp",)), plain("d")),
    ),
]


@pytest.mark.parametrize(
    "mesh", [{"dp": 1, "cp": 2}, {"dp": 2, "cp": 1}, MESHES["dp2cp2"]], ids=str
)
def test_programs_that_plans_emit(ranks, mesh):
    cases = []
    for src, dst in PLANNED:
        tail = [Size((1,) * n) for n in (7, 4, 3)][-len(src.dims) + 1 :]
        for first in SIZES["pack"] if src.dims[0].kind == "pack" else [Size((1,) * 5)]:
            home = tuple(HOME[k] % mesh["dp"] for k in range(len(first.lengths)))
            size = first._replace(home=home, homes=mesh["dp"])
            cases.append(Case(src, dst, (size, *tail), len(cases)))
    check_cases(ranks, mesh, cases, plan=False)
