"""What must be sent at least, element by element, from who holds and who wants it."""

import random
from itertools import product

import pytest

from tests import oracle
from tests.oracle import Size
from tests.vlshard.exhaustive import may_be, named
from vlshard.language.layout import layout
from vlshard.language.mesh_shape import MeshShape
from vlshard.programs.information import least_sent


def messages(case, mesh):
    """Messages of all elements: none to who has it; T - 1, W - 1 and perhaps 1 for a sum."""
    src, dst, sizes = case
    named_axes = (oracle.axes_of(src) | oracle.axes_of(dst)) - {*dst.pending}
    summed = [axis for axis in src.pending if axis not in dst.pending]
    ranks = [
        rank
        for rank in range(oracle.count(mesh))
        if all(at == 0 or axis in named_axes for axis, at in oracle.place_of(mesh, rank).items())
    ]
    have = [{*product(*map(list, oracle.rows_of(src, sizes, mesh, rank)))} for rank in ranks]
    want = [{*product(*map(list, oracle.rows_of(dst, sizes, mesh, rank)))} for rank in ranks]
    found = 0
    for element in set().union(*want):
        wanting = [i for i in range(len(ranks)) if element in want[i]]
        with_it = [i for i in wanting if element in have[i]]
        if summed:
            found += oracle.ranks_along(summed, mesh) - 1 + len(wanting) - 1 + (not with_it)
        else:
            found += len(wanting) - len(with_it)
    return -(-found // len(ranks))


@pytest.mark.parametrize("kinds", ["plain plain", "fused plain", "pack plain"])
@pytest.mark.parametrize("mesh", [{"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}])
def test_the_bound_counts_messages(kinds, mesh):
    rng = random.Random(f"{kinds} {mesh}")
    space = oracle.specs_of(kinds.split(), tuple(mesh)[:2])
    pack = Size((3, 1, 2), home=(1, 0, 3), homes=12)
    of = {"plain": Size((1,) * 5, home=(0, 3, 1, 1, 2), homes=12), "fused": Size((12, 12))}
    sizes = tuple({**of, "pack": pack}[kind] for kind in kinds.split())
    pairs = [rng.choices(space, k=2) for _ in range(60)]
    for src, dst in [pair for pair in pairs if may_be(*pair)]:
        given = named(src, dst, sizes)
        sides = (layout(oracle.text_of(side), MeshShape(**mesh), **given) for side in (src, dst))
        assert least_sent(*sides) == messages((src, dst, sizes), mesh)


@pytest.mark.parametrize(("dst", "elements"), [("s@cp", 896), ("s", 1792)])
def test_a_sum_of_eight_terms(dst, elements):
    sides = (layout(side, MeshShape(cp=8), s=1024) for side in ("s + cp", dst))
    assert least_sent(*sides) == elements
