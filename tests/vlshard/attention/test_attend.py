"""Attention in one call: what one process gives, and what is refused."""

import pytest
import torch
from torch.nn import functional as F

from vlshard import (
    LayoutError,
    Mesh,
    Packing,
    PlanError,
    SpecError,
    attend,
    gather,
    hybrid,
    ring,
    ulysses,
)


def heads(*shape):
    draw = torch.Generator().manual_seed(len(shape))
    return [torch.randn(*shape, generator=draw) for _ in "qkv"]


def test_one_process_gives_what_torch_gives():
    q, k, v = heads(2, 6, 4, 8)
    found = attend(q, k, v, "b s@cp.zigzag h d", Mesh(cp=1), ring("cp"), causal=True)
    wanted = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


def test_samples_of_a_pack_do_not_see_each_other():
    q, k, v = heads(5, 2, 4)
    found = attend(q, k, v, "(smp s) h d", Mesh(), smp=Packing([2, 3]))
    parts = [
        F.scaled_dot_product_attention(*(x[rows].transpose(0, 1) for x in (q, k, v)))
        for rows in (slice(2), slice(2, 5))
    ]
    torch.testing.assert_close(found, torch.cat(parts, 1).transpose(0, 1))


def refused(text, mode, mesh=None, shapes=((2, 6, 6, 8),) * 3, **sizes):
    q, k, v = (torch.zeros(shape) for shape in shapes)
    with pytest.raises((SpecError, LayoutError, PlanError)) as error:
        attend(q, k, v, text, mesh or Mesh(dp=2, cp=4), mode, **sizes)
    return str(error.value)


def test_a_cut_that_no_mode_meets_is_pointed_at():
    assert refused("b@dp s@cp h d", None) == (
        "segments are cut over 'cp', and no attention mode brings their keys together\n"
        "  b@dp s@cp h d\n"
        "        ^^^\n"
        '  fix: gather("cp") or ulysses("cp")'
    )
    assert "segments are cut over 'dp'" in refused(
        "(smp@cp s)@dp h d", gather("cp"), shapes=((3, 4, 8),) * 3, smp=Packing([6] * 4)
    )


def test_heads_that_cannot_be_dealt_are_counted():
    assert refused("b@dp s@cp h d", ulysses("cp")) == (
        "6 heads cannot be dealt to cp=4\n"
        "  b@dp s@cp h d -> b@dp s h@cp d\n"
        "                          ^^^^\n"
        "  fix: degrees 1, 2, 3, 6 work; or gather('cp') or ring('cp')"
    )


def test_a_mode_over_what_is_whole_is_refused():
    assert refused("b@dp s h d", ring("cp")) == (
        "attention works over 'cp', over which the sequence is whole\n"
        "  b@dp s h d\n"
        "  fix: split the sequence over cp, or leave the mode out"
    )


OTHERS = [
    (("b s@cp h d", gather("xp")), "unknown mesh axis 'xp' in attention"),
    (("b s@xp h d", gather("cp")), "unknown mesh axis 'xp'\n  b s@xp h d\n      ^^"),
    (("b s@cp h d", hybrid(ulysses="cp")), "hybrid(ulysses='cp') takes ulysses= and one of"),
    (
        ("b s@cp h d@dp", ring("cp")),
        "attention needs whole queries, keys and values\n  b s@cp h d@dp\n           ^^^^",
    ),
    (
        ("b s@cp h d + dp", ring("cp")),
        "attention needs whole queries, keys and values\n  b s@cp h d + dp\n               ^^",
    ),
    (("b s@cp d", ring("cp")), "the spec has 3 dims, the tensor 4"),
    (("b s@cp", ring("cp"), None, ((2, 6),) * 3), "q (2, 6), k (2, 6) and v (2, 6) do not go"),
]


@pytest.mark.parametrize(("given", "message"), OTHERS, ids=str)
def test_what_does_not_fit_is_refused(given, message):
    assert refused(*given).startswith(message)


def test_shapes_that_do_not_go_together_are_told():
    shapes = ((2, 6, 6, 8), (2, 6, 4, 8), (2, 6, 4, 8))
    assert refused("b s@cp h d", ring("cp"), shapes=shapes) == (
        "q (2, 6, 6, 8), k (2, 6, 4, 8) and v (2, 6, 4, 8) do not go together\n"
        "  b s@cp h d\n"
        "  k and v have the positions and the head width of q, and q's heads or a divisor"
    )
    with_size = refused("b s@cp h d", ring("cp"), s=10)
    assert with_size.startswith(
        "the tensor of rank 0 has shape (2, 6, 6, 8), the layout gives it (2, 3"
    )
