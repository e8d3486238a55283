"""Packs of samples: who holds which token, which keys it sees, and how a layout is packed."""

import numpy as np
import pytest

from tests.tiny import tiny_config
from vlshard import LayoutError, Mesh, MeshShape, Packing, Plan, gather, layout, replicate
from vlshard.attention.segments import seen_rows, segment_runs
from vlshard.plan.header import SampleFacts, make_headers
from vlshard.plan.tokens import pack_tokens, token_places

LENGTHS = [1, 2, 7, 13, 17]
SPECS = ["(smp s@cp) m", "(smp s@cp.zigzag) m", "(smp s)@cp m", "(smp@cp s) m"]

PACKS = {
    "b s m": "(smp s) m",
    "b@dp.home s m": "(smp@dp.home s) m",
    "b@dp.home s@cp.zigzag m": "(smp@dp.home s@cp.zigzag) m",
    "b@(dp cp.0).home s@cp.1 m": "(smp@(dp cp.0).home s@cp.1) m",
    "(smp@dp.home s)@cp m": "(smp@dp.home s)@cp m",
}


@pytest.mark.parametrize("text", PACKS)
def test_a_packed_layout_keeps_the_splits(text):
    assert pack_tokens(text, MeshShape(dp=2, cp=2)) == PACKS[text]


def test_other_dims_are_not_packed():
    with pytest.raises(LayoutError) as error:
        pack_tokens("b@dp t m", MeshShape(dp=2), where="plans/long.py text.tokens")
    assert str(error.value) == (
        "only a layout of 'b s m' can be packed\n"
        "  plans/long.py text.tokens: b@dp t m\n"
        "                             ^^^^^^^^"
    )


def test_a_packed_plan_differs_in_its_tokens_alone():
    plan = Plan(
        mesh=Mesh(dp=1, cp=2),
        params={"**": replicate()},
        layouts={"vision.patches": "(img s)@cp c", "text.tokens": "b@dp.home s@cp m"},
        attention={"vision": gather("cp"), "text": gather("cp")},
    )
    layouts = {"vision.patches": "(img s)@cp c", "text.tokens": "(smp@dp.home s@cp) m"}
    assert plan.packed().layouts == layouts
    assert plan.packed().attention == plan.attention


def test_token_places_of_a_zigzag_pack():
    """Four chunks a sample: 5 tokens make 2 1 1 1, then 3 make 0 1 1 1 (the spare ones go on)."""
    tokens = layout("(smp s@cp.zigzag) m", MeshShape(cp=2), smp=Packing([5, 3]), m=1)
    places = [np.stack(token_places(tokens, rank))[:, 0].tolist() for rank in range(2)]
    assert places == [[[0, 0, 0, 1], [0, 1, 4, 2]], [[0, 0, 1, 1], [2, 3, 0, 1]]]


def test_token_places_of_padded_rows():
    tokens = layout("b s@cp.zigzag m", MeshShape(cp=2), b=2, s=8, m=1)
    samples, positions = token_places(tokens, 1)
    assert samples.tolist() == [[0] * 4, [1] * 4]
    assert positions.tolist() == [[2, 3, 4, 5]] * 2


def test_no_padding_and_no_token_lost():
    facts = [SampleFacts(row=i, tokens=n, labelled=0) for i, n in enumerate(LENGTHS)]
    plan = Plan(
        mesh=Mesh(dp=2, cp=2),
        params={"**": replicate()},
        layouts={"vision.patches": "(img s) c", "text.tokens": "(smp@dp.home s@cp.zigzag) m"},
        attention={"text": gather("cp")},
    )
    bound = plan.bind(tiny_config(), 4)
    header = make_headers(facts, bound.data_ranks)[0]
    shares = [bound.share(header, rank) for rank in range(4)]
    assert [share.samples.shape for share in shares] == [(1, 5), (1, 5), (1, 15), (1, 15)]
    held = {(s, p) for x in shares for s, p in zip(x.samples[0], x.positions[0], strict=True)}
    assert held == {(sample, place) for sample, n in enumerate(LENGTHS) for place in range(n)}


def sample_of(row):
    """(sample, first row of it) of a row of the pack, by counting."""
    start = 0
    for sample, length in enumerate(LENGTHS):
        if row < start + length:
            return sample, start
        start += length
    raise AssertionError(row)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("text", SPECS)
def test_each_query_sees_its_sample_up_to_itself(text, ranks):
    """Brute force over every query, and no key is wanted that no query sees."""
    tokens = layout(text, MeshShape(cp=ranks), smp=Packing(LENGTHS), m=1)
    for rank in range(ranks):
        rows = tokens.indices(rank)[0]
        keys = seen_rows(rows, LENGTHS, causal=True)
        expected = [list(range(sample_of(row)[1], row + 1)) for row in rows.tolist()]
        assert keys.tolist() == sorted({key for seen in expected for key in seen})
        runs = segment_runs(rows, keys, LENGTHS, causal=True)
        table = zip(runs.q_starts, runs.q_lengths, runs.k_starts, runs.k_lengths, strict=True)
        found = {
            q + i: keys[k : k + i + 1 + nk - nq].tolist()
            for q, nq, k, nk in table
            for i in range(nq)
        }
        assert [found[i] for i in range(rows.size)] == expected
