"""Layouts and attention modes mixed freely: still what one process computes.

Four ranks, four vision heads and 4 query over 2 key/value heads, so that Ulysses over cp=4 has to
repeat key heads.
"""

from functools import cache

import pytest
import torch

from model.config.config import Config
from tests.batches import Builder, batches
from tests.tiny import tiny_raw
from tests.training import Outcome, Run, gradient_faults
from vlshard.plan.header import SampleFacts, make_headers
from vlshard.plan.plan import load_plan

SEED = 5
SPREAD = {"initializer_range": 0.08}
CASES = ("mixed sizes", "one sample, one image", "lengths 1 2 7 13 17", "two images of one sample")

# (mesh, vision patches, vision mode, text tokens, text mode)
MIXES = {
    "whole pack, gather; zigzag, gather, cp4": (
        "dp=1, cp=4",
        "(img@dp.home s)@cp c",
        'gather("cp")',
        "b@dp.home s@cp.zigzag m",
        'gather("cp")',
    ),
    "each image cut, ulysses; contiguous, gather, cp4": (
        "dp=1, cp=4",
        "(img@dp.home s@cp) c",
        'ulysses("cp")',
        "b@dp.home s@cp m",
        'gather("cp")',
    ),
    "whole images, no mode; zigzag, ulysses, cp4": (
        "dp=1, cp=4",
        "(img@dp.home@cp s) c",
        None,
        "b@dp.home s@cp.zigzag m",
        'ulysses("cp")',
    ),
    "whole images, ulysses; contiguous, ulysses, dp2 cp2": (
        "dp=2, cp=2",
        "(img@dp.home@cp s) c",
        'ulysses("cp")',
        "b@dp.home s@cp m",
        'ulysses("cp")',
    ),
    "each image cut, gather; zigzag, ulysses, dp2 cp2": (
        "dp=2, cp=2",
        "(img@dp.home s@cp) c",
        'gather("cp")',
        "b@dp.home s@cp.zigzag m",
        'ulysses("cp")',
    ),
    "everybody's images cut over cp, text at home, dp2 cp2": (
        "dp=2, cp=2",
        "(img s)@cp c",
        'gather("cp")',
        "b@dp.home s@cp.zigzag m",
        'gather("cp")',
    ),
    "vision copied over cp, text cut, dp2 cp2": (
        "dp=2, cp=2",
        "(img@dp.home s) c",
        None,
        "b@dp.home s@cp.zigzag m",
        'gather("cp")',
    ),
    "vision cut over cp, text copied over it, dp2 cp2": (
        "dp=2, cp=2",
        "(img@dp.home s)@cp c",
        'ulysses("cp")',
        "b@dp.home s m",
        None,
    ),
    "images dealt over dp by count, text rows cut by chunk, dp4": (
        "dp=4",
        "(img@dp s) c",
        None,
        "b@dp s m",
        None,
    ),
    "images dealt evenly inside cp; zigzag, gather, dp2 cp2": (
        "dp=2, cp=2",
        "(img@dp.home@cp.balance s) c",
        None,
        "b@dp.home s@cp.zigzag m",
        'gather("cp")',
    ),
    "images of all dealt over everybody, dp2 cp2": (
        "dp=2, cp=2",
        "(img@(dp cp).balance s) c",
        None,
        "b@dp.home s@cp m",
        'gather("cp")',
    ),
    "decoder over dp alone, vision cut over part of it, dp2x2": (
        "dp=(2, 2)",
        "(img@dp.0.home s)@dp.1 c",
        'ulysses("dp.1")',
        "b@dp.home s m",
        None,
    ),
    "vision dealt over one part and cut over the other, cp2x2": (
        "cp=dict(deal=2, ulysses=2)",
        "(img@cp.deal.balance s)@cp.ulysses c",
        'gather("cp.ulysses")',
        "b s@cp.zigzag m",
        'gather("cp")',
    ),
    "whole pack, ring in flight; zigzag, ring in flight, cp4": (
        "dp=1, cp=4",
        "(img@dp.home s)@cp c",
        'ring("cp", overlap=True)',
        "b@dp.home s@cp.zigzag m",
        'ring("cp", overlap=True)',
    ),
    "hybrid with ring; hybrid with gather, all in flight, cp2x2": (
        "dp=1, cp=dict(ring=2, ulysses=2)",
        "(img@dp.home s)@cp c",
        'hybrid(ulysses="cp.ulysses", ring="cp.ring", overlap=True)',
        "b@dp.home s@cp.zigzag m",
        'hybrid(ulysses="cp.ulysses", gather="cp.ring", overlap=True)',
    ),
    "images of all dealt over everybody, then ulysses and gather in flight, dp2 cp2": (
        "dp=2, cp=2",
        "(img@dp.balance s)@cp c",
        'ulysses("cp", overlap=True)',
        "b@dp.home s@cp.zigzag m",
        'gather("cp", overlap=True)',
    ),
    "rows at home in two, split again, dp2 by dp2": (
        "dpo=2, dpi=2",
        "(img@dpo.home@dpi s) c",
        None,
        "b@dpo.home@dpi s m",
        None,
    ),
    "packed: each sample zigzag, gather, dp2 cp2": (
        "dp=2, cp=2",
        "(img@dp.home s)@cp c",
        'gather("cp")',
        "(smp@dp.home s@cp.zigzag) m",
        'gather("cp")',
    ),
    "packed: each sample cut, ulysses, cp4": (
        "dp=1, cp=4",
        "(img@dp.home s@cp) c",
        'ulysses("cp")',
        "(smp@dp.home s@cp) m",
        'ulysses("cp")',
    ),
    "packed: the pack cut anywhere, gather over a part, cp2x2": (
        "dp=1, cp=(2, 2)",
        "(img@dp.home@cp s) c",
        None,
        "(smp@dp.home@cp.0 s)@cp.1 m",
        'gather("cp.1")',
    ),
    "packed: whole samples dealt by length inside cp, dp2 cp2": (
        "dp=2, cp=2",
        "(img@dp.home@cp.balance s) c",
        None,
        "(smp@dp.home@cp.balance s) m",
        None,
    ),
}
TEMPLATE = """
from vlshard import Mesh, Plan, fsdp, gather, hybrid, replicate, ring, ulysses

def plan(world):
    mesh = Mesh({mesh})
    return Plan(
        mesh=mesh,
        params={{"model.visual.**": replicate(), "**": fsdp(" ".join(mesh.sizes))}},
        layouts={{"vision.patches": "{patches}", "text.tokens": "{tokens}"}},
        attention={{{modes}}},
    )
"""


def raw():
    return tiny_raw(text=SPREAD, vision={**SPREAD, "num_heads": 4})


def cases(config):
    known = batches(config)
    known["two images of one sample"] = (
        Builder(config, 21).add(3, (4, 4), 2, (6, 4), 4).add(6).batch()
    )
    return {name: known[name] for name in CASES}


def probe_all(plan, expected=None) -> dict[str, Outcome]:
    run, known = Run(Config.from_dict(raw()), plan, seed=SEED), expected or {}
    return {name: run.probe(batch, known.get(name)) for name, batch in cases(run.config).items()}


@cache
def reference():
    return probe_all(None)


# What the others vary is tested site by site, too; make parity runs all of them.
QUICK = (
    "whole pack, gather; zigzag, gather, cp4",
    "whole images, no mode; zigzag, ulysses, cp4",
    "everybody's images cut over cp, text at home, dp2 cp2",
    "vision copied over cp, text cut, dp2 cp2",
    "decoder over dp alone, vision cut over part of it, dp2x2",
    "vision dealt over one part and cut over the other, cp2x2",
    "whole pack, ring in flight; zigzag, ring in flight, cp4",
    "hybrid with ring; hybrid with gather, all in flight, cp2x2",
    "images of all dealt over everybody, then ulysses and gather in flight, dp2 cp2",
    "packed: each sample zigzag, gather, dp2 cp2",
    "packed: the pack cut anywhere, gather over a part, cp2x2",
)


def pytest_generate_tests(metafunc):
    """Every mix with ``--all-pairs``, else the quick ones."""
    if "mix" in metafunc.fixturenames:
        chosen = MIXES if metafunc.config.getoption("all_pairs") else QUICK
        metafunc.parametrize("mix", chosen)


def test_mix_equals_one_process(mix, ranks, tmp_path):
    mesh, patches, vision, tokens, text = MIXES[mix]
    modes = ", ".join(f'"{s}": {m}' for s, m in (("vision", vision), ("text", text)) if m)
    path = tmp_path / "mix.py"
    path.write_text(TEMPLATE.format(mesh=mesh, patches=patches, tokens=tokens, modes=modes))
    found = ranks(4).run(probe_all, str(path), reference(), timeout=120)[0]
    for name, expected in reference().items():
        assert found[name].faults == [], name
        assert found[name].loss == pytest.approx(expected.loss, rel=1e-6)
        assert found[name].norm == pytest.approx(expected.norm, rel=1e-5)


def test_vision_gradient_is_not_lost_where_one_rank_encodes_all(ranks, tmp_path):
    """Rank 0 encodes the image, rank 1 holds all of its placeholders."""
    path = tmp_path / "one.py"
    mesh, patches, tokens = "dp=1, cp=2", "(img@dp.home@cp s) c", "b@dp.home s@cp.zigzag m"
    modes = '"text": gather("cp")'
    path.write_text(TEMPLATE.format(mesh=mesh, patches=patches, tokens=tokens, modes=modes))
    found = ranks(2).run(one_image, str(path))
    expected = one_image(None)
    assert found[0].patches == [[24, 0]]
    assert gradient_faults(found[0], expected) == []
    name = "model.visual.patch_embed.proj.weight"
    ratio = found[0].gradients[name].norm() / expected.gradients[name].norm()
    assert float(ratio) == pytest.approx(1.0, abs=1e-5)


def one_image(plan) -> Outcome:
    """Three text tokens, a 4x6 image, two text tokens; padded to 16 under cp=2."""
    run = Run(Config.from_dict(raw()), plan, seed=SEED)
    return run.probe(Builder(run.config, 31).add(3, (4, 6), 2).batch())


def test_reference_is_more_than_noise():
    for outcome in reference().values():
        assert outcome.norm > 0.1
        assert torch.isfinite(torch.tensor(outcome.loss))


def dealt_heads(plan, raw):
    """Which query and key heads this rank attends with, and the gradient of each key head."""
    config = Config.from_dict(raw)
    bound = load_plan(plan, torch.distributed.get_world_size()).bind(config, 4)
    facts = [SampleFacts(row=0, tokens=8, labelled=7)]
    at = bound.step(make_headers(facts, bound.data_ranks)[0])
    q, kv, width = config.heads["text"]
    rows = at.share.positions.size
    queries = torch.arange(float(q))[:, None].expand(1, rows, q, width)
    keys = torch.arange(float(kv))[:, None].expand(1, rows, kv, width).clone().requires_grad_()
    brought = [at.start(f"text.{n}", x).wait() for n, x in (("q", queries), ("k", keys))]
    brought[1].sum().backward()
    heads = [x.flatten(0, -3)[0, :, 0].tolist() for x in brought]
    return *heads, keys.grad[0, :, :, 0]


def test_fewer_key_heads_than_ranks_are_copied_and_their_gradients_summed(ranks, tmp_path):
    path = tmp_path / "heads.py"
    tokens, modes = "b@dp.home s@cp.zigzag m", '"text": ulysses("cp")'
    fields = {"mesh": "dp=1, cp=4", "patches": "(img@dp.home@cp s) c", "tokens": tokens}
    path.write_text(TEMPLATE.format(**fields, modes=modes))
    raw = tiny_raw(text={"num_attention_heads": 8, "num_key_value_heads": 2})
    results = ranks(4).run(dealt_heads, str(path), raw)
    assert [q for q, _, _ in results] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [k for _, k, _ in results] == [[0], [0], [1], [1]]
    for _, _, gradient in results:
        assert gradient.tolist() == [[2.0, 2.0]] * len(gradient)
