"""Cases from the field under splits: DeepStack on cut tokens, few key heads, what ranks store."""

import pytest
import torch

from model.config.config import Config
from tests.batches import Builder, batches
from tests.dist.test_splits import KV_PART, KV_WHOLE, PLANS, TP, VISION, raw, write_plan_of
from tests.tiny import whole_share
from tests.training import Run
from vlshard import local_boundaries
from vlshard.storage.norm import local_part

SEED = 4
LAYERS = "model.language_model.layers"
HOME = "(img@dp.home s) c"

# Per number of ranks: mesh, splits, patches, tokens, modes; then other fields.
DEEPSTACK = {
    2: ("dp=1, tp=2", TP | VISION, "(img@dp.home s)@tp c", "b@dp.home s@tp m", "{}"),
    4: PLANS[4, "tp2 cp2, gather"],
}
# Query heads over tp and key heads copied over some of it, weights sharded over two ranks.
FEW_KEYS = {
    (4, 1): ("dp=2, tp=2", KV_WHOLE | {"text.mlp": "f@tp"}, HOME, "b@dp.home s@tp m", "{}",
        {"params": '{"**": fsdp("dp")}'}),
    (4, 2): ("dp=1, tp=(2, 2)", KV_PART, HOME, "b@dp.home s@tp.0@tp.1 m", "{}"),
    (8, 2): ("dp=2, tp=(2, 2)", KV_PART, HOME, "b@dp.home s@tp.0@tp.1 m", "{}",
        {"params": '{"**": fsdp("dp")}'}),
}


def pytest_generate_tests(metafunc):
    """Eight ranks with ``--all-pairs``."""
    if "few_keys" in metafunc.fixturenames:
        thorough = metafunc.config.getoption("all_pairs")
        metafunc.parametrize("few_keys", [key for key in FEW_KEYS if thorough or key[0] < 8])


def states(plan, raw) -> dict[tuple[int, int], torch.Tensor]:
    """States after the first three decoder layers, visual rows added, by sample and position."""
    run = Run(Config.from_dict(raw), plan, seed=SEED)
    made = Builder(run.config, 4).add(3, (4, 6), 4).add(1, (4, 4), (2, 6), 1).batch()
    (header,) = run.headers(made)
    at = run.bound.step(header) if run.bound else None
    share, found = at.share if at else whole_share(header), []
    for layer in run.model.get_submodule(LAYERS)[1:]:
        layer.register_forward_pre_hook(lambda _, given: found.append(given[0].detach()))
    run.one_forward_backward(made, header, at or local_boundaries(header.segments))
    after = torch.stack(found).flatten(1, 2).movedim(0, 1)
    places = zip(share.samples.ravel().tolist(), share.positions.ravel().tolist(), strict=True)
    tokens = [sample.tokens for sample in header.samples]
    return {(k, p): x for (k, p), x in zip(places, after, strict=True) if p < tokens[k]}


@pytest.mark.parametrize("world", DEEPSTACK)
def test_states_after_deepstack_are_those_of_one_process(world, ranks, tmp_path):
    path = write_plan_of(tmp_path / "split.py", *DEEPSTACK[world])
    expected, found = states(None, raw()), {}
    for held in ranks(world).run(states, path, raw()):
        found |= held
    assert found.keys() == expected.keys() and len(found) == 28
    for place, right in expected.items():
        torch.testing.assert_close(found[place], right, rtol=1e-5, atol=1e-5)


def few_key_gradients(plan, raw):
    """Gradients of keys and values, and the norm of all."""
    run = Run(Config.from_dict(raw), plan, seed=SEED)
    found = run.probe(batches(run.config)["mixed sizes"])
    names = ("k_proj", "v_proj", "k_norm")
    return {n: g for n, g in found.gradients.items() if any(k in n for k in names)}, found.norm


def test_few_key_heads_have_the_gradients_of_one_process(few_keys, ranks, tmp_path):
    world, key_heads = few_keys
    path = write_plan_of(tmp_path / "split.py", *FEW_KEYS[few_keys])
    expected, norm = few_key_gradients(None, raw(key_heads))
    assert len(expected) == 4 * 5  # two weights, two biases, a norm
    for found, mine in ranks(world).run(few_key_gradients, path, raw(key_heads)):
        assert mine == pytest.approx(norm, rel=1e-6)
        for name, right in expected.items():
            # A key's bias moves all scores of a query alike: its gradient is rounding.
            scale = norm * 1e-2 if name.endswith("k_proj.bias") else right.norm()
            assert (found[name] - right).norm() <= 1e-5 * scale, name


STORED = {
    "fsdp over dp": (4, ("dp=2, tp=2", TP, HOME, "b@dp.home s@tp m", "{}",
        {"params": '{"**": fsdp("dp")}'}), 1024),
    "tp alone": (2, ("dp=1, tp=2", TP, HOME, "b@dp.home s@tp m", "{}",
        {"params": '{"**": replicate()}'}), 2048),
    "fsdp over tp alone": (2, ("dp=1, tp=2", TP, HOME, "b@dp.home s@tp m", "{}"), 2048),
}


def stored(path, raw) -> int:
    """Elements of a 64 x 64 weight of a decoder layer on this rank."""
    run = Run(Config.from_dict(raw), path, seed=SEED)
    run.forward_backward(batches(run.config)["text only"])
    weight = run.model.get_parameter(f"{LAYERS}.0.self_attn.q_proj.weight")
    assert weight.grad is not None
    return local_part(weight).numel()


@pytest.mark.parametrize("case", STORED)
def test_each_rank_stores_its_part_of_a_weight(case, ranks, tmp_path):
    world, plan, elements = STORED[case]
    path = write_plan_of(tmp_path / "split.py", *plan)
    assert ranks(world).run(stored, path, raw()) == [elements] * world
