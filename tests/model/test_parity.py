"""Logits, loss and every raw gradient, against transformers' own model on one thread, fp32."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from model.config.config import Config
from model.data.inputs import build_inputs
from model.data.sample import IGNORED, Sample
from model.modules.qwen3_vl_moe import Qwen3VLMoe
from tests.hf_oracle import (
    assert_gradients_agree,
    assert_outcomes_agree,
    gradients,
    hf_batch,
    hf_model,
    hf_outcome,
    our_model,
    our_outcome,
)
from tests.tiny import Shapes, frame, image, make_batch, sample, tiny_raw
from vlshard.plan.boundaries import local_boundaries
from vlshard.plan.header import Share

WIDE, TALL, ONE, SQUARE, CLIP = (1, 4, 6), (1, 6, 2), (1, 2, 2), (1, 4, 4), (2, 2, 4)
TEXT = sample([3, 1, 4, 1, 5, 9, 2, 6, 5, 35])
PICTURE = sample([1, 2, 3, *image(WIDE), 4, 5], WIDE)
LONG = sample(
    [8, *image(TALL), 7, *image(WIDE), *range(20, 40), *image(SQUARE), 9], TALL, WIDE, SQUARE
)
TINY_IMAGES = sample([1, *(t for _ in range(9) for t in (*image(ONE), 11)), 2], *[ONE] * 9)
VIDEO = sample([1, 5, 6, *frame(SQUARE), 7, 8, *frame(SQUARE), 9, 9, *frame(SQUARE), 2], (3, 4, 4))
BOTH = sample([1, *image(SQUARE), 5, *frame(CLIP), 6, *frame(CLIP), 2], SQUARE, CLIP)
SHORT_CLIP = sample([1, 5, *frame((1, 2, 4)), 2], (1, 2, 4))
FEW_LABELS = sample([1, *image(WIDE), 4, 5, 6], WIDE, labels=[1, *[IGNORED] * 8, 4, IGNORED, 6])

CASES: dict[str, tuple[Sample, ...]] = {
    "text only": (TEXT,),
    "one image": (PICTURE,),
    "images of several sizes": (LONG, PICTURE),
    "many one-token images": (TINY_IMAGES,),
    "video": (VIDEO,),
    "image and video": (BOTH,),
    "videos of one frame and of two": (SHORT_CLIP, BOTH),
    "two lengths, one without image": (PICTURE, TEXT),
    "few labels": (FEW_LABELS, TEXT),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "dense layers by number": {"text": {"mlp_only_layers": [0, 2]}},
    "dense layers by step": {"text": {"decoder_sparse_step": 2}},
    "tied head": {"tie_word_embeddings": True},
    "biases in attention": {"text": {"attention_bias": True}},
    "padding token": {"text": {"pad_token_id": 5}},
    "no DeepStack": {"vision": {"deepstack_visual_indexes": []}},
    "one DeepStack level": {"vision": {"deepstack_visual_indexes": [1]}},
    "patch of 16": {"vision": {"patch_size": 16, "num_heads": 4, "in_channels": 1}},
    "four vision heads, odd table": {"vision": {"num_heads": 4, "num_position_embeddings": 25}},
    "top 3": {"text": {"num_experts_per_tok": 3}},
}


@cache
def models(setting: str | None = None) -> tuple:
    """The oracle, and this project's model with its weights."""
    raw = tiny_raw(**SETTINGS[setting] if setting else {})
    hf = hf_model(raw)
    return hf, our_model(raw, hf)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", CASES)
def test_parity_with_transformers(case: str, side: str):
    hf, model = models()
    batch = make_batch(model.config, *CASES[case])
    assert_outcomes_agree(our_outcome(model, batch), hf_outcome(hf, batch, side=side))


@pytest.mark.parametrize("setting", SETTINGS)
def test_parity_under_other_settings(setting: str):
    hf, model = models(setting)
    batch = make_batch(model.config, LONG, TEXT)
    assert_outcomes_agree(our_outcome(model, batch), hf_outcome(hf, batch))


def test_parity_with_the_loss_that_transformers_itself_computes():
    hf, model = models()
    batch = make_batch(model.config, LONG, FEW_LABELS)
    want = hf(**hf_batch(batch), use_cache=False).loss
    torch.testing.assert_close(model(batch.inputs, batch.at), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("setting", [None, "dense layers by step"])
def test_parity_of_the_auxiliary_loss(setting: str | None):
    hf, model = models(setting)
    batch = make_batch(model.config, PICTURE, TEXT, LONG)
    want, got = hf_outcome(hf, batch, aux=True), our_outcome(model, batch, aux=True)
    assert_outcomes_agree(got, want)
    without = our_outcome(model, batch)
    assert got.loss - without.loss > 0.05


@pytest.mark.parametrize("every", [{"text": 1}, {"vision": 1}, {"vision": 2, "text": 3}])
def test_checkpointing_changes_no_bit(every: dict[str, int], monkeypatch):
    _, model = models()
    batch = make_batch(model.config, LONG, VIDEO)
    plain = our_outcome(model, batch)
    monkeypatch.setattr(model, "checkpoint_every", every)
    again = our_outcome(model, batch)
    assert torch.equal(again.loss, plain.loss)
    assert all(
        torch.equal(again.gradients[name], plain.gradients[name]) for name in plain.gradients
    )


@pytest.mark.parametrize(
    ("site", "path"), [("vision", "visual.blocks"), ("text", "language_model.layers")]
)
def test_checkpointing_recomputes_every_kth_block(site: str, path: str, monkeypatch):
    _, model = models()
    blocks = model.model.get_submodule(path)
    calls: Counter[int] = Counter()
    for i, block in enumerate(blocks):
        compute = block._compute
        monkeypatch.setattr(
            block, "_compute", lambda *a, i=i, f=compute: (calls.update([i]), f(*a))[1]
        )
    monkeypatch.setattr(model, "checkpoint_every", {site: 2})
    batch = make_batch(model.config, PICTURE)
    model(batch.inputs, batch.at).backward()
    assert dict(calls) == {i: 1 + i % 2 for i in range(len(blocks))}


def test_no_labels_at_all_give_loss_zero_and_zero_gradients():
    _, model = models()
    batch = make_batch(model.config, sample(PICTURE.ids, WIDE, labels=[IGNORED] * len(PICTURE.ids)))
    outcome = our_outcome(model, batch)
    assert outcome.loss == 0
    assert outcome.logits.shape == (0, 96)
    for name, gradient in outcome.gradients.items():
        assert gradient is not None, name
        assert not gradient.any(), name


@pytest.mark.parametrize(
    ("patches", "rows", "positions"),
    [
        (np.arange(0), np.arange(0), np.arange(13)),
        (np.arange(0), np.arange(0), np.arange(0)),
        (np.arange(0), np.arange(1), np.arange(10, 13)),
    ],
    ids=["no rows", "no rows and no positions", "no visual row"],
)
def test_a_rank_without_rows_runs_and_keeps_all_gradients(patches, rows, positions):
    _, model = models()
    batch = make_batch(model.config, PICTURE)
    share = Share(patches, *np.meshgrid(rows, positions, indexing="ij"), visual=True)
    inputs = build_inputs(batch.header, share, {0: PICTURE}, batch.pixels, model.config)
    model.zero_grad()
    model(inputs, local_boundaries()).backward()
    got = gradients(model)
    assert all(gradient is not None for gradient in got.values())
    assert not any(g.any() for name, g in got.items() if name.startswith("model.visual"))


def test_logits_exist_for_labelled_rows_only():
    model = Qwen3VLMoe(Config.from_dict(tiny_raw(text={"vocab_size": 5003})))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.05)
    ids = [*range(20, 60), *image(WIDE), *range(20, 50)]
    labels = [IGNORED] * (len(ids) - 3) + ids[-3:]
    batch = make_batch(model.config, sample(ids, WIDE, labels=labels))
    with Shapes() as seen:
        model(batch.inputs, batch.at).backward()
    weights, rows = {(5003, 64), (64, 5003)}, {(0, 5003), (3, 5003), (5003, 3)}
    assert {shape for shape in seen.found if 5003 in shape} <= weights | rows


def test_longer_padding_changes_nothing():
    _, model = models()
    batch = make_batch(model.config, PICTURE, TEXT)
    plain = our_outcome(model, batch)
    share = Share(np.arange(24), *np.indices((2, 24)), visual=True)
    samples = dict(enumerate(batch.samples))
    inputs = build_inputs(batch.header, share, samples, batch.pixels, model.config)
    model.zero_grad()
    loss = model(inputs, batch.at)
    loss.backward()
    torch.testing.assert_close(loss.detach(), plain.loss, rtol=1e-6, atol=0)
    assert_gradients_agree(gradients(model), plain.gradients)


@pytest.mark.parametrize(
    "setting", [None, "tied head", "dense layers by step", "biases in attention"]
)
def test_names_and_shapes_are_those_of_transformers(setting: str | None):
    hf, model = models(setting)
    ours = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    theirs = {name: tuple(weight.shape) for name, weight in hf.named_parameters()}
    assert ours == theirs
    assert ours == dict(model.config.parameter_shapes())


@pytest.mark.parametrize("setting", [None, "tied head"])
def test_every_unit_is_called_and_together_they_own_all_parameters(setting: str | None):
    _, model = models(setting)
    called: set[str] = set()
    hooks = [
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: called.add(path))
        for path in model.units()
    ]
    batch = make_batch(model.config, PICTURE)
    model(batch.inputs, batch.at)
    for hook in hooks:
        hook.remove()
    assert called == set(model.units())
    order = [path for path in model.units() if path]
    assert all(
        order.index(a) < order.index(b) for a in order for b in order if a.startswith(b + ".")
    )


def test_built_on_meta_it_runs_once_it_has_memory_and_weights():
    _, model = models()
    with torch.device("meta"):
        empty = Qwen3VLMoe(model.config)
    assert all(weight.is_meta for weight in empty.parameters())
    assert not list(empty.buffers())
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    batch = make_batch(model.config, PICTURE)
    assert torch.equal(empty(batch.inputs, batch.at), model(batch.inputs, batch.at))


def test_bf16_stays_close_to_fp32():
    _, model = models()
    batch = make_batch(model.config, PICTURE, TEXT)
    half = Qwen3VLMoe(model.config)
    half.load_state_dict(model.state_dict())
    half.bfloat16()
    got, want = half(batch.inputs, batch.at), model(batch.inputs, batch.at)
    got.backward()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0.02, atol=0)  # bf16 rounds to 2**-8
    assert all(weight.grad.dtype == torch.bfloat16 for weight in half.parameters())


def test_widths_that_the_grouped_product_cannot_take_are_refused_by_name():
    with pytest.raises(ValueError, match=r"text_config.moe_intermediate_size=26"):
        Qwen3VLMoe(Config.from_dict(tiny_raw(text={"moe_intermediate_size": 26})))
    dense = {"moe_intermediate_size": 26, "mlp_only_layers": [0, 1, 2, 3]}
    assert isinstance(Qwen3VLMoe(Config.from_dict(tiny_raw(text=dense))), nn.Module)
