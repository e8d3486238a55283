"""Packed text on several ranks: samples do not see each other, and no number moves."""

from functools import cache

import numpy as np
import pytest
import torch

from model.config import Config
from model.inputs import build_inputs
from tests.batches import batches
from tests.tables import PACKED_FIRST, PACKED_SECOND
from tests.tiny import make_batch, tiny_config
from tests.training import Outcome, Run, gradient_faults
from vlshard import Mesh, Plan, gather, replicate, ulysses

SEED = 3
CASES = ("text only", "lengths 1 2 7 13 17", "video and image", "micro-batches, uneven")
TEMPLATE = """
from vlshard import load_plan

def plan(world):
    return load_plan("plans/{name}.py", world).packed()
"""


@pytest.fixture
def packed(tmp_path):
    """The path of a plan with its tokens packed."""

    def write(name):
        path = tmp_path / f"{name}_packed.py"
        path.write_text(TEMPLATE.format(name=name))
        return str(path)

    return write


def probe_all(plan, raw) -> dict[str, Outcome]:
    run = Run(Config.from_dict(raw), plan, seed=SEED)
    known = batches(run.config)
    return {name: run.probe(known[name]) for name in CASES}


@cache
def reference():
    return probe_all(None, tiny_config().raw)


@pytest.mark.parametrize(("name", "world"), [("vision_cp_colossal", 2), ("baseline_dp", 4)])
def test_packed_plan_equals_one_process_unpacked(name, world, packed, ranks, parity_table):
    found = ranks(world).run(probe_all, packed(name), tiny_config().raw, timeout=120)[0]
    known = batches(tiny_config())
    for case, expected in reference().items():
        outcome = found[case]
        off = abs(outcome.loss - expected.loss) / expected.loss
        norm_off = abs(outcome.norm - expected.norm) / expected.norm
        faults = gradient_faults(outcome, expected)
        parity_table(f"{name}, packed"[:20], world, case, outcome, off, norm_off, faults)
        assert not faults
        assert off <= 1e-6  # fp32 sums in another order
        assert norm_off <= 1e-5
        assert sum(outcome.tokens[0]) == sum(len(sample.ids) for sample in known[case].samples)


def logits(rows, layouts, raw):
    """Logits of every row but the last of each sample, by (number of the row, position).

    ``layouts`` is (mesh, layout of tokens, mode); this rank gives what it holds.
    """
    config = Config.from_dict(raw)
    sizes, tokens, mode = layouts
    bound = Plan(
        mesh=Mesh(**sizes),
        params={"**": replicate()},
        layouts={"vision.patches": "(img@dp.home s) c", "text.tokens": tokens},
        attention={"text": mode} if mode else {},
    ).bind(config, Mesh(**sizes).size)
    batch = make_batch(config, *(PAIR[i].sample(config, everywhere(i, config)) for i in rows))
    at, samples = bound.step(batch.header), dict(enumerate(batch.samples))
    pixels = {(k, 0): PIXELS[i] for k, i in enumerate(rows)}
    inputs = build_inputs(batch.header, at.share, samples, pixels, config)
    model = Run(config, None, seed=SEED).model
    with torch.no_grad():
        found = model.logits(inputs, at)
    places = np.stack([at.share.samples.ravel(), at.share.positions.ravel()], axis=1)
    held = places[inputs.text.labelled.numpy()].tolist()
    return {(rows[k], p): row for (k, p), row in zip(held, found, strict=True)}


def everywhere(i, config):
    """All positions, so that every row has a label; that of the first token counts nowhere."""
    return range(len(PAIR[i].ids(config)))


PAIR = (PACKED_FIRST, PACKED_SECOND)
PIXELS = torch.randn(2, 16, 96, generator=torch.Generator().manual_seed(7))
WHOLE = {"dp": 1}, "(smp@dp.home s) m", None
CUTS = {
    "one process": (1, WHOLE),
    "cp2, zigzag, gather": (2, ({"dp": 1, "cp": 2}, "(smp@dp.home s@cp.zigzag) m", gather("cp"))),
    "cp2, pack cut, ulysses": (2, ({"dp": 1, "cp": 2}, "(smp@dp.home s)@cp m", ulysses("cp"))),
    "cp4, contiguous, gather": (4, ({"dp": 1, "cp": 4}, "(smp@dp.home s@cp) m", gather("cp"))),
}


@pytest.mark.parametrize("cut", CUTS)
def test_samples_of_a_pack_do_not_see_each_other(cut, ranks):
    world, layouts = CUTS[cut]
    raw = tiny_config().raw
    one = {**logits([0], WHOLE, raw), **logits([1], WHOLE, raw)}
    if world == 1:
        packed = [logits([0, 1], layouts, raw)]
    else:
        packed = ranks(world).run(logits, [0, 1], layouts, raw)
    found = {place: row for held in packed for place, row in held.items()}
    assert sorted(found) == [(0, p) for p in range(7)] + [(1, p) for p in range(8)]
    for place, row in found.items():
        assert torch.allclose(row, one[place], rtol=0, atol=2e-6), place  # fp32, other sums
