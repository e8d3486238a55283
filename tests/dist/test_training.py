"""Several optimizer steps under plans: ranks without images, text-only steps, storage, replicas."""

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from model.config.config import Config
from tests.batches import Builder, batches
from tests.plan_names import MAIN_PLANS
from tests.tiny import tiny_config
from tests.training import Run, full, gradient_faults
from vlshard import MeshShape, layout

SEED = 7
TURNS = ("images on the first rank only", "images on the last rank only", "text only")


def follow_turns(plan, raw):
    """Images on one side, then on the other, then on none; with weight decay."""
    run = Run(Config.from_dict(raw), plan, seed=SEED)
    cases = batches(run.config)
    outcome = run.train([cases[name] for name in TURNS], steps=3, weight_decay=0.1)
    visual = {n: g is None for n, g in run.raw_gradients().items() if "visual" in n}
    return outcome, visual


@cache
def turns_of_one_process():
    return follow_turns(None, tiny_config().raw)[0]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("plan", MAIN_PLANS)
def test_ranks_without_images_follow_the_others(plan, world, ranks):
    results = ranks(world).run(follow_turns, f"plans/{plan}.py", tiny_config().raw)
    expected = turns_of_one_process()
    for outcome, without in results:
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
        assert all(without.values())  # a step of text leaves no vision gradient on any rank


def text_only_step(plan, raw):
    """One AdamW step on text alone: bits of the vision weights before and after."""
    run = Run(Config.from_dict(raw), plan, seed=SEED)
    before = {n: full(p.detach()).clone() for n, p in run.model.named_parameters()}
    outcome = run.train([batches(run.config)["text only"]], steps=1, weight_decay=0.1)
    same = {name: torch.equal(before[name], after) for name, after in outcome.weights.items()}
    return same


@pytest.mark.parametrize("plan", MAIN_PLANS)
def test_text_only_steps_do_not_decay_the_vision_tower(plan, ranks):
    for same in ranks(2).run(text_only_step, f"plans/{plan}.py", tiny_config().raw):
        assert {unchanged for name, unchanged in same.items() if ".visual." in name} == {True}
        assert not same["model.language_model.layers.0.self_attn.q_proj.weight"]


STORAGE_PLAN = """
from vlshard import Mesh, Plan, fsdp, gather, replicate

def plan(world):
    return Plan(
        mesh=Mesh({mesh}),
        params={{"model.visual.**": {vision}, "**": fsdp("{decoder}")}},
        layouts={{"vision.patches": "{patches}", "text.tokens": "{tokens}"}},
        attention={{{modes}}},
    )
"""
DP4 = ("dp=4", "dp", "(img@dp.home s) c", "b@dp.home s m", "")
DP22 = ("dp=(2, 2)", "dp", "(img@dp.home s) c", "b@dp.home s m", "")
CP_MODES = '"vision": gather("cp"), "text": gather("cp")'
DP2CP2 = ("dp=2, cp=2", "dp cp", "(img@dp.home s)@cp c", "b@dp.home s@cp.zigzag m", CP_MODES)
CP4 = ("dp=1, cp=4", "dp cp", "(img@dp.home s)@cp c", "b@dp.home s@cp.zigzag m", CP_MODES)
CP22 = ("cp=(2, 2)", "cp", "(img s)@cp c", "b s@cp.zigzag m", CP_MODES)

# Over how many ranks the vision tower is sharded, and what the decoder does with the same ranks.
# Two of four needs a part of size 2, so that axis of four ranks is split.
STORAGES = {
    "1, dp4": (*DP4, "replicate()"),
    "2, dp4": (*DP22, 'fsdp("dp.1", replicate="dp.0")'),
    "4, dp4": (*DP4, 'fsdp("dp")'),
    "1, dp2 cp2": (*DP2CP2, "replicate()"),
    "2, dp2 cp2": (*DP2CP2, 'fsdp(shard="cp", replicate="dp")'),
    "4, dp2 cp2": (*DP2CP2, 'fsdp("dp cp")'),
    "1, cp4": (*CP4, "replicate()"),
    "2, cp4": (*CP22, 'fsdp("cp.1")'),
    "4, cp4": (*CP4, 'fsdp("cp")'),
}


def uneven(config):
    """Four samples with 1, 3, 2 and 6 labelled tokens, three of them with images."""
    return (
        Builder(config, 41)
        .add(3, (4, 6), 3, labelled=(11,))
        .add(9, labelled=(2, 5, 8))
        .add(2, (4, 4), 2, (2, 4), 3, labelled=(13, 15))
        .add(4, (6, 4), 5, labelled=(1, 2, 3, 12, 13, 14))
        .batch()
    )


def store(plan, raw):
    """Raw gradients of one batch; then two AdamW steps, and whether replicas are the same bits."""
    run = Run(Config.from_dict(raw), plan, seed=SEED)
    outcome = run.train([uneven(run.config)], steps=2, weight_decay=0.1)
    parameters = dict(run.model.named_parameters())
    assert all(p.is_leaf and p.device.type == "cpu" for p in parameters.values())
    same, elements = True, 0
    for name, p in parameters.items():
        local = p.to_local() if isinstance(p, DTensor) else p
        if ".visual." in name:
            elements += local.numel()
        if isinstance(p, DTensor) and p.device_mesh.mesh_dim_names == ("replicate", "shard"):
            group = p.device_mesh.get_group("replicate")
            others = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(others, local.detach().contiguous(), group=group)
            same &= all(torch.equal(other, local) for other in others)
    shapes = {name: tuple(weight.shape) for name, weight in outcome.weights.items()}
    q_proj = parameters["model.language_model.layers.0.self_attn.q_proj.weight"]
    local_q = q_proj.to_local().numel() if isinstance(q_proj, DTensor) else q_proj.numel()
    return outcome, same, elements, shapes, local_q


@cache
def stored_in_one_process():
    return store(None, tiny_config().raw)[0]


@pytest.mark.parametrize("storage", STORAGES)
def test_vision_storage_is_free_of_the_decoder(storage, ranks, tmp_path):
    mesh, decoder, patches, tokens, modes, vision = STORAGES[storage]
    path = tmp_path / "storage.py"
    fields = {"mesh": mesh, "decoder": decoder, "patches": patches, "tokens": tokens}
    path.write_text(STORAGE_PLAN.format(**fields, modes=modes, vision=vision))
    results = ranks(4).run(store, str(path), tiny_config().raw)
    expected = stored_in_one_process()
    shapes = tiny_config().parameter_shapes()
    visual = [shape for name, shape in shapes.items() if ".visual." in name]
    parts = MeshShape(x=int(storage[0]))
    stored = [
        sum(prod(layout(f"a@x {dims_of(shape)}", parts, **sizes_of(shape)).local_shape(place)) for shape in visual)
        for place in range(parts.size)
    ]
    for rank, (outcome, same, elements, found_shapes, local_q) in enumerate(results):
        assert gradient_faults(outcome, expected) == []
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
        assert same
        assert found_shapes == shapes
        assert elements == stored[rank % parts.size]  # the axes that shard are the innermost
        assert local_q == 64 * 64 // 4


def dims_of(shape):
    """Names for all dims of a parameter but the first."""
    return " ".join("bcdef"[: len(shape) - 1])


def sizes_of(shape):
    return dict(zip("abcdef", shape, strict=False))


def routers(plan, raw):
    run = Run(Config.from_dict(raw), plan, seed=SEED)
    outcome = run.train([batches(run.config)["mixed sizes"]], steps=3)
    names = [name for name in outcome.weights if name.endswith("mlp.gate.weight")]
    return {n: (outcome.gradients[n], outcome.weights[n]) for n in names}


@pytest.mark.parametrize("plan", ["baseline_dp", "vision_cp_ulysses"])
def test_routers_learn_alike_on_all_ranks(plan, ranks):
    results = ranks(2).run(routers, f"plans/{plan}.py", tiny_config().raw)
    expected = routers(None, tiny_config().raw)
    assert len(expected) == 4
    for name, (gradient, weight) in expected.items():
        assert float(gradient.norm()) > 1e-4
        for found in results:
            torch.testing.assert_close(found[name][0], gradient, rtol=1e-4, atol=1e-6)
            assert torch.equal(found[name][1], results[0][name][1])
            torch.testing.assert_close(found[name][1], weight, rtol=1e-4, atol=1e-5)


FROZEN = {
    "all of vision": ("model.visual.",),
    "vision blocks": ("model.visual.blocks.",),
    "decoder": ("model.language_model.", "lm_head."),
}


def frozen(plan, raw, freeze):
    run = Run(Config.from_dict(raw), plan, seed=SEED, freeze=freeze, checkpoint={"vision": 1})
    return run.train([batches(run.config)[name] for name in TURNS], steps=3, weight_decay=0.1)


@pytest.mark.parametrize("part", FROZEN)
@pytest.mark.parametrize("plan", ["baseline_dp", "vision_cp_colossal", "decoder_tp"])
def test_frozen_parts_stay_and_the_rest_follows(plan, part, ranks):
    found = ranks(2).run(frozen, f"plans/{plan}.py", tiny_config().raw, FROZEN[part])[0]
    expected = frozen(None, tiny_config().raw, FROZEN[part])
    assert gradient_faults(found, expected) == []
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)


def test_recomputation_changes_nothing(ranks):
    found = ranks(2).run(recomputed, "plans/vision_cp_ulysses.py", tiny_config().raw)[0]
    expected = recomputed(None, tiny_config().raw)
    for outcome in found:
        assert gradient_faults(outcome, expected[0]) == []
        assert outcome.loss == pytest.approx(expected[0].loss, rel=1e-6)


def recomputed(plan, raw):
    """The same batch without recomputation, and with it on either side and on both."""
    run = Run(Config.from_dict(raw), plan, seed=SEED)
    outcomes = []
    for every in ({}, {"vision": 1}, {"text": 2}, {"vision": 2, "text": 1}):
        run.model.checkpoint_every = every
        outcomes.append(run.probe(batches(run.config)["mixed sizes"]))
    return outcomes


def spoilt(plan, expected):
    """Faults of a step beside what one process gave, with one value or one gradient changed."""
    run = Run(tiny_config(), plan, seed=SEED)
    batch = batches(run.config)["mixed sizes"]
    found = [run.probe(batch, expected).faults]
    for name, gradient in expected.gradients.items():
        if name in SPOILT:
            changed = None if SPOILT[name] is None else gradient.clone()
            if changed is not None:
                changed[-1] += SPOILT[name]
            other = replace(expected, gradients={**expected.gradients, name: changed})
            found.append([fault.split(":")[0] for fault in run.probe(batch, other).faults])
    return found


SPOILT = {
    "model.visual.merger.norm.bias": None,
    "model.language_model.layers.0.self_attn.q_proj.weight": 0.01,
}


@pytest.mark.parametrize("plan", ["baseline_dp", "vision_cp_colossal"])
def test_a_wrong_gradient_is_found_wherever_it_is_stored(plan, ranks):
    run = Run(tiny_config(), None, seed=SEED)
    expected = run.probe(batches(run.config)["mixed sizes"])
    for clean, *others in ranks(2).run(spoilt, f"plans/{plan}.py", expected):
        assert clean == []
        assert sorted(others) == [[name] for name in sorted(SPOILT)]
