"""Every attention mode over every layout of the rows against dense attention in fp64.

Whole queries, keys and values are known everywhere; each rank brings its rows, and gets what dense
attention with a mask gives for them, forward and backward.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.dist.events import messages, recorded
from vlshard import Mesh, Packing, gather, hybrid, layout, ring, ulysses
from vlshard.plan.header import Share
from vlshard.comm.row_move import RowMove
from vlshard.attention.schedule import Site, schedule
from vlshard.attention.modes import Heads, Mode
from vlshard.plan.step_boundaries import StepBoundaries

# Frames in patches (merge units of 4) and the data rank that reads each.
SEGMENTS = {
    "mixed": ([24, 8, 16, 4, 12, 8], [0, 0, 1, 1, 1, 1]),
    "one huge": ([64], [1]),
    "crumbs": ([4] * 9, [0, 1, 0, 1, 1, 1, 0, 0, 0]),
    "half the ranks empty": ([16, 8], [0, 0]),
    "less than a unit a rank": ([4], [0]),
    "videos": ([16, 16, 16, 8, 8], [0, 0, 0, 1, 1]),
    "nothing": ([], []),
}
# Rows of tokens, and the data rank that reads each.
ROWS = {"two rows": (2, 16, [0, 1]), "three rows": (3, 16, [0, 0, 1]), "no row": (0, 16, [])}

TWO = {"dp": 2, "cp": 2}
PARTS = {"dp": 1, "cp": {"ring": 2, "ulysses": 2}}
PATCHES = [
    (TWO, "(img@dp.home s)@cp c", [ulysses("cp"), gather("cp"), ring("cp")]),
    (TWO, "(img@dp.home s@cp) c", [ulysses("cp"), gather("cp"), ring("cp")]),
    (TWO, "(img@dp.home@cp.balance s) c", [None, ulysses("cp"), gather("cp"), ring("cp")]),
    (TWO, "(img@(dp cp).balance s) c", [None, gather("dp cp"), ring("dp cp")]),
    (TWO, "(img s)@(dp cp) c", [ulysses("dp cp"), gather("cp dp"), ring("dp cp")]),
    (TWO, "(img s)@dp@cp c", [hybrid(ulysses="cp", ring="dp"), hybrid(ulysses="dp", gather="cp")]),
    (
        PARTS,
        "(img@dp.home s)@cp c",
        [
            hybrid(ulysses="cp.ulysses", ring="cp.ring"),
            hybrid(ulysses="cp.ulysses", gather="cp.ring"),
            hybrid(ulysses="cp.ring", ring="cp.ulysses"),
            ring("cp"),
        ],
    ),
    (
        PARTS,
        "(img@dp.home s@cp) c",
        [
            hybrid(ulysses="cp.ulysses", ring="cp.ring"),
            hybrid(ulysses="cp.ulysses", gather="cp.ring"),
        ],
    ),
    (PARTS, "(img@cp.ring.balance s)@cp.ulysses c", [gather("cp.ulysses"), ring("cp.ulysses")]),
]
TOKENS = [
    (TWO, "b@dp.home s@cp m", [ulysses("cp"), gather("cp"), ring("cp")]),
    (TWO, "b@dp.home s@cp.zigzag m", [ulysses("cp"), gather("cp"), ring("cp")]),
    (TWO, "b s@(dp cp).zigzag m", [ulysses("dp cp"), gather("dp cp"), ring("dp cp")]),
    (
        PARTS,
        "b@dp s@cp.zigzag m",
        [
            hybrid(ulysses="cp.ulysses", ring="cp.ring"),
            hybrid(ulysses="cp.ulysses", gather="cp.ring"),
        ],
    ),
]
HEADS = Heads(4, 2, 8)
NOTHING = Share(*[np.arange(0)] * 3, visual=True)


@dataclass(frozen=True)
class Inputs:
    """Whole q, k, v and the gradient of the result, on distinct random data."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def draw(cls, rows, width=8, dtype=torch.float64):
        g = torch.Generator().manual_seed(rows)
        return cls(*(torch.randn(rows, h, width, generator=g, dtype=dtype) for h in (4, 2, 2, 4)))


def dense(inputs, segments, causal):
    """Result and gradients of masked attention over all rows, in fp64."""
    q, k, v = (x.double().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    number = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments).long())
    seen = number[:, None] == number[None]
    if causal:
        seen = seen.tril()
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    scores = torch.einsum("qhd,khd->hqk", q, wide[0]) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, wide[1])
    return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.grad.double())


def met(site, mode, inputs):
    """This rank's rows of the result and of the gradients, by a mode."""
    rows = torch.from_numpy(site.rows(site.mesh.rank))
    site.mesh.make_groups(mode.ways.groups if mode else [])
    at = StepBoundaries(NOTHING, {"site": schedule(site, mode)}, RowMove(None, None, 1, 1))
    q, k, v = (x[rows].requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    pending = {
        n: at.start(f"site.{n}", x.view(*site.lead, *x.shape[1:]))
        for n, x in (("k", k), ("v", v), ("q", q))
    }
    out = at.attend("site", pending["q"], pending["k"], pending["v"])
    assert out.shape[: len(site.lead)] == site.lead
    out.backward(inputs.grad[rows].view(out.shape))
    return rows, (out.detach().flatten(0, -3), q.grad, k.grad, v.grad)


def with_overlap(mode: Mode | None, overlap):
    return mode and type(mode)(**{**vars(mode), "overlap": overlap})


def faults_of(sites, mode):
    """Cases in which this rank's part is not what dense attention gives."""
    faults = []
    for number, (name, site) in enumerate(sites.items()):
        inputs = Inputs.draw(sum(site.segments))
        expected = dense(inputs, site.segments, site.causal)
        rows, found = met(site, with_overlap(mode, number % 2 == 0), inputs)
        for what, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            off = float((a - b[rows]).abs().max()) if len(rows) else 0.0
            if not off <= 1e-11:  # fp64 rounding
                faults.append(f"{name}: {what} off by {off:.1e}")
    return faults


def patch_sites(mesh, text):
    packings = {
        name: Packing(lengths, unit=4, home=home, homes=mesh.sizes["dp"], cost=(1.0, 8.0))
        for name, (lengths, home) in SEGMENTS.items()
        if mesh.sizes["dp"] > 1 or not any(home)
    }
    return {
        name: Site(mesh, layout(text, mesh, img=packing, c=1), packing.lengths, False, HEADS)
        for name, packing in packings.items()
    }


def token_sites(mesh, text):
    sites = {}
    for name, (count, length, home) in ROWS.items():
        at_home = [rank % mesh.sizes["dp"] for rank in home]
        rows = Packing([1] * count, home=at_home, homes=mesh.sizes["dp"])
        bound = layout(text, mesh, b=rows, s=length, m=1)
        sites[name] = Site(mesh, bound, (length,) * count, True, HEADS)
    return sites


def all_modes(axes, text, modes, every):
    """Faults by mode; all cases, or the first and another two that differ from mode to mode."""
    mesh = Mesh(**axes)
    sites = (patch_sites if "img" in text else token_sites)(mesh, text)
    first, *rest = sites
    faults = {}
    for turn, mode in enumerate(modes):
        some = {first, rest[2 * turn % len(rest)], rest[(2 * turn + 1) % len(rest)]}
        chosen = {name: site for name, site in sites.items() if every or name in some}
        faults[str(mode)] = faults_of(chosen, mode)
    return faults


@pytest.mark.parametrize(("axes", "text", "modes"), PATCHES + TOKENS, ids=lambda x: str(x)[:40])
def test_modes_equal_dense_attention(axes, text, modes, ranks, pytestconfig):
    every = pytestconfig.getoption("--all-pairs")
    for found in ranks(4).run(all_modes, axes, text, modes, every, timeout=120):
        assert found == {str(mode): [] for mode in modes}


def huge(mode):
    """Whole numbers whose products are exact in fp32 and reach 1e5: weights are mostly 0 and 1."""
    mesh = Mesh(**TWO)
    site = patch_sites(mesh, "(img@dp.home s)@cp c")["mixed"]
    plain = Inputs.draw(72, width=16, dtype=torch.float32)
    q, k = (x.mul(1.5).round().clamp(-3, 3) * 128 for x in (plain.q, plain.k))
    inputs = Inputs(q, k, plain.v, plain.grad)
    rows, found = met(site, mode, inputs)
    expected = dense(inputs, site.segments, False)
    off = [float((a - b[rows]).abs().max()) for a, b in zip(found, expected, strict=True)]
    return float(torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)).max()) / 4, off


@pytest.mark.parametrize("mode", [ring("cp"), ring("cp", overlap=True)], ids=str)
def test_ring_is_safe_where_products_are_huge(mode, ranks):
    """Log-sum-exps of 1.7e5 are multiples of 1/64 in fp32, so weights are good to 1/64."""
    for top, (out, dq, dk, dv) in ranks(4).run(huge, mode):
        assert 1.3e5 < top < 2.6e5
        assert max(out, dv) < 4 / 64  # terms of up to 4
        assert max(dq, dk) < 384 / 64  # terms of up to 384


def moved_rows(mode):
    """Rows of the result that change with the last patch of the third frame (rows 32 to 47)."""
    mesh = Mesh(**PARTS)
    packing = Packing([24, 8, 16, 4], unit=4, home=[0] * 4)
    bound = layout("(img@dp.home s)@cp c", mesh, img=packing, c=1)
    site = Site(mesh, bound, packing.lengths, False, HEADS)
    inputs = Inputs.draw(52)
    rows, (before, *_) = met(site, mode, inputs)
    for x in (inputs.k, inputs.v):
        x[47] += 1.0
    _, (after, *_) = met(site, mode, inputs)
    return rows[(before != after).flatten(1).any(1)].tolist()


@pytest.mark.parametrize("mode", PATCHES[6][2], ids=str)
def test_a_frame_sees_all_of_itself_and_nothing_else(mode, ranks):
    changed = ranks(4).run(moved_rows, with_overlap(mode, True))
    assert sorted(sum(changed, [])) == list(range(32, 48))


def sent(mode, text):
    """Elements of each message of a forward: two key heads of 8 a row."""
    mesh = Mesh(dp=1, cp=2)
    packing = Packing([24, 8], unit=4, home=[0, 0])
    bound = layout(text, mesh, img=packing, c=1)
    site = Site(mesh, bound, packing.lengths, False, HEADS)
    with messages() as sizes:
        met(site, mode, Inputs.draw(32))
    return sizes


# Rank 0 holds rows 0 to 15 of the first frame, rank 1 its last 8 and the second frame. Forward,
# then the gradients of the same rows the other way; a ring passes its block in backward again.
SENT = [
    (gather("cp"), "(img@dp.home s)@cp c", [[16] * 2 + [8] * 2, [8] * 2 + [16] * 2]),
    (ring("cp"), "(img@dp.home s)@cp c", [[32] * 3, [32] * 3]),
    (gather("cp"), "(img@dp.home@cp s) c", [[], []]),
    (ring("cp"), "(img@dp.home@cp s) c", [[], []]),
]


@pytest.mark.parametrize(("mode", "text", "rows"), SENT, ids=str)
def test_only_rows_that_are_needed_travel(mode, text, rows, ranks):
    assert ranks(2).run(sent, mode, text) == [[16 * n for n in sizes] for sizes in rows]


def flown(mode):
    mesh = Mesh(dp=1, cp=2)
    packing = Packing([24, 8], unit=4, home=[0, 0])
    bound = layout("(img@dp.home s)@cp c", mesh, img=packing, c=1)
    site = Site(mesh, bound, packing.lengths, False, HEADS)
    with recorded() as events:
        met(site, mode, Inputs.draw(32))
    return events


def test_all_flights_start_before_the_first_is_waited_for(ranks):
    three, one = ["launch"] * 3 + ["wait"] * 3, ["launch", "wait"]
    two = ["launch"] * 2 + ["wait"] * 2
    assert ranks(2).run(flown, ulysses("cp", overlap=True)) == [three + one * 2 + three] * 2
    assert ranks(2).run(flown, gather("cp", overlap=True)) == [two * 2] * 2
    assert ranks(2).run(flown, ulysses("cp")) == [one * 8] * 2
