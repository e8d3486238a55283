"""Packed text on several ranks: samples do not see each other, and no number moves."""

from functools import cache

import numpy as np
import pytest
import torch

from model.config.config import Config
from model.data.inputs import build_inputs
from model.modules.init import fill
from model.modules.qwen3_vl_moe import Qwen3VLMoe
from plans.decoder_parallel import tensor_parallel
from tests.batches import batches
from tests.tables import PACKED_FIRST, PACKED_SECOND
from tests.tiny import make_batch, tiny_config, whole_share
from tests.training import Outcome, Run
from vlshard import Mesh, Plan, gather, replicate, ulysses
from vlshard.storage import Parts
from vlshard.storage.shard_model import cut_parameters

SEED = 3
CASES = ("text only", "lengths 1 2 7 13 17", "video and image", "micro-batches, uneven")


def probe_all(plan, raw, expected=None) -> dict[str, Outcome]:
    run = Run(Config.from_dict(raw), plan, seed=SEED, packed=plan is not None)
    known = batches(run.config)
    return {name: run.probe(known[name], (expected or {}).get(name)) for name in CASES}


@cache
def reference():
    return probe_all(None, tiny_config().raw)


@pytest.mark.parametrize(("name", "world"), [("vision_cp_colossal", 2), ("baseline_dp", 4)])
def test_packed_plan_equals_one_process_unpacked(name, world, ranks, parity_table):
    arguments = (f"plans/{name}.py", tiny_config().raw, reference())
    found = ranks(world).run(probe_all, *arguments, timeout=120)[0]
    known = batches(tiny_config())
    for case, expected in reference().items():
        outcome = found[case]
        off = abs(outcome.loss - expected.loss) / expected.loss
        norm_off = abs(outcome.norm - expected.norm) / expected.norm
        count = len(expected.gradients)
        parity_table(name, world, f"{case}, packed", outcome, off, norm_off, count)
        assert outcome.faults == []
        assert off <= 1e-6  # fp32 sums in another order
        assert norm_off <= 1e-5
        assert sum(outcome.tokens[0]) == sum(len(sample.ids) for sample in known[case].samples)


PAIR = (PACKED_FIRST, PACKED_SECOND)
PIXELS = torch.randn(2, 16, 96, generator=torch.Generator().manual_seed(7))
CUTS = {
    "one process": (1, ({"dp": 1}, "(smp@dp.home s) m", None)),
    "cp2, zigzag, gather": (2, ({"dp": 1, "cp": 2}, "(smp@dp.home s@cp.zigzag) m", gather("cp"))),
    "cp2, pack cut, ulysses": (2, ({"dp": 1, "cp": 2}, "(smp@dp.home s)@cp m", ulysses("cp"))),
    "cp4, contiguous, gather": (4, ({"dp": 1, "cp": 4}, "(smp@dp.home s@cp) m", gather("cp"))),
    "tp2, pack whole": (2, ({"dp": 1, "tp": 2}, "(smp@dp.home s) m", None)),
    "tp2, pack cut": (2, ({"dp": 1, "tp": 2}, "(smp@dp.home s)@tp m", None)),
    "cp2 tp2": (4, ({"dp": 1, "cp": 2, "tp": 2}, "(smp@dp.home s@cp.zigzag)@tp m", gather("cp"))),
}


def logits(rows, layouts, raw):
    """Logits of every row but the last of each sample, by (number of the row, position).

    ``layouts`` is (mesh, layout of tokens, mode), and this rank gives what it holds; None = no plan.
    """
    config = Config.from_dict(raw)
    lengths = [len(PAIR[i].ids(config)) for i in rows]
    labelled = (PAIR[i].sample(config, range(n)) for i, n in zip(rows, lengths, strict=True))
    batch = make_batch(config, *labelled)
    bound = bind(layouts, config) if layouts else None
    at = bound.step(batch.header) if bound else batch.at
    share = at.share if layouts else whole_share(batch.header)
    pixels = {(k, 0): PIXELS[i] for k, i in enumerate(rows)}
    samples = dict(enumerate(batch.samples))
    inputs = build_inputs(batch.header, share, samples, pixels, config)
    with torch.no_grad():
        found = model_of(config, bound.parts if bound else Parts()).logits(inputs, at)
    places = np.stack([share.samples.ravel(), share.positions.ravel()], axis=1)
    held = places[inputs.text.labelled.numpy()].tolist()
    return {(rows[k], p): row for (k, p), row in zip(held, found, strict=True)}


def model_of(config, parts):
    """The model with all of its parameters, or with this rank's parts of those that are cut."""
    with torch.device("meta"):
        model = Qwen3VLMoe(config)
    cut_parameters(model, parts)
    fill(model.to_empty(device="cpu"), config, SEED, parts)
    return model


def bind(layouts, config):
    """A plan whose vision stays at home, and whose decoder is split if there is an axis for it."""
    sizes, tokens, mode = layouts
    plan = Plan(
        mesh=Mesh(**sizes),
        params={"**": replicate()},
        layouts={"vision.patches": "(img@dp.home s) c", "text.tokens": tokens},
        attention={"text": mode} if mode else {},
        splits=tensor_parallel("tp") if "tp" in sizes else {},
    )
    return plan.bind(config, plan.mesh.size)


@pytest.mark.parametrize("cut", CUTS)
def test_samples_of_a_pack_do_not_see_each_other(cut, ranks):
    world, layouts = CUTS[cut]
    raw = tiny_config().raw
    one = {**logits([0], None, raw), **logits([1], None, raw)}
    if world == 1:
        packed = [logits([0, 1], layouts, raw)]
    else:
        packed = ranks(world).run(logits, [0, 1], layouts, raw)
    found = {place: row for held in packed for place, row in held.items()}
    assert sorted(found) == [(0, p) for p in range(7)] + [(1, p) for p in range(8)]
    for place, row in found.items():
        assert torch.allclose(row, one[place], rtol=0, atol=2e-6), place  # fp32, other sums
