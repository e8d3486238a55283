"""The oracle of the model: transformers' own, with this project's batches."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from model.config.config import Config
from model.data.sample import IGNORED
from model.modules.qwen3_vl_moe import Qwen3VLMoe
from tests.tiny import IMAGE, VIDEO, Batch
from vlshard.plan.header import Grid


def hf_model(raw: Mapping[str, Any], seed: int = 0) -> Qwen3VLMoeForConditionalGeneration:
    """The oracle in fp32, every weight random and distinct (norms around 1)."""
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**copy.deepcopy(dict(raw))))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            one = "norm" in name and name.endswith("weight")
            weight.copy_(1 + 0.2 * noise if one else 0.12 * noise)
    return model.train()


def our_model(raw: Mapping[str, Any], hf: Qwen3VLMoeForConditionalGeneration) -> Qwen3VLMoe:
    """This project's model with the oracle's weights."""
    model = Qwen3VLMoe(Config.from_dict(dict(raw)))
    weights = hf.state_dict()
    if raw["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    model.load_state_dict(weights, strict=True)
    return model


def hf_batch(batch: Batch, *, side: str = "right") -> dict[str, Tensor]:
    """The batch as transformers' model takes it, padded on either side."""
    longest = max(len(sample.ids) for sample in batch.samples)
    ids, mask, labels = (np.zeros((len(batch.samples), longest), dtype=np.int64) for _ in range(3))
    labels[:] = IGNORED
    for i, sample in enumerate(batch.samples):
        width = len(sample.ids)
        place = slice(0, width) if side == "right" else slice(longest - width, longest)
        ids[i, place], mask[i, place], labels[i, place] = sample.ids, 1, sample.labels
        labels[i, place.start] = IGNORED  # nothing but padding could predict the first token
    kinds = np.select([ids == IMAGE, ids == VIDEO], [1, 2], 0)
    call = {"input_ids": ids, "attention_mask": mask, "labels": labels, "mm_token_type_ids": kinds}
    return {name: torch.from_numpy(value) for name, value in call.items()} | _visual(batch)


def _visual(batch: Batch) -> dict[str, Tensor]:
    """Pixels and grids, images and videos apart; an item is a video if its tokens say so."""
    items: dict[str, list[tuple[Grid, Tensor]]] = {"image": [], "video": []}
    for i, sample in enumerate(batch.samples):
        tokens = sample.ids[np.isin(sample.ids, (IMAGE, VIDEO))]
        used = 0
        for j, grid in enumerate(sample.grids):
            kind = "video" if tokens[used] == VIDEO else "image"
            used += grid[0] * grid[1] * grid[2] // batch.config.unit
            items[kind].append((grid, batch.pixels[i, j]))
    call: dict[str, Tensor] = {}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if items[kind]:
            call[name] = torch.cat([rows for _, rows in items[kind]])
            call[f"{kind}_grid_thw"] = torch.tensor([grid for grid, _ in items[kind]])
    return call


Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Outcome:
    """What a model made of a batch: logits at labelled rows, loss, raw gradients by name."""

    logits: Tensor
    loss: Tensor
    gradients: Gradients


def gradients(model: torch.nn.Module) -> Gradients:
    """Raw gradients by name."""
    return {name: weight.grad for name, weight in model.named_parameters()}


def hf_outcome(
    hf: Qwen3VLMoeForConditionalGeneration, batch: Batch, *, side: str = "right", aux: bool = False
) -> Outcome:
    """The oracle's word: mean of the cross entropies of all labels after the shift."""
    hf.zero_grad()
    call = hf_batch(batch, side=side)
    labels = call.pop("labels")
    out = hf(**call, use_cache=False, output_router_logits=aux)
    wanted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    here = wanted != IGNORED
    logits = out.logits[here]
    loss = F.cross_entropy(logits, wanted[here], reduction="sum") / max(int(here.sum()), 1)
    if aux:
        loss = loss + hf.config.text_config.router_aux_loss_coef * out.aux_loss
    loss.backward()
    return Outcome(logits.detach(), loss.detach(), gradients(hf))


def our_outcome(model: Qwen3VLMoe, batch: Batch, *, aux: bool = False) -> Outcome:
    """What this project's model makes of the batch."""
    model.zero_grad()
    inputs, at = batch.inputs, batch.at
    loss = model(inputs, at, aux_loss=aux)
    loss.backward()
    with torch.no_grad():
        logits = model.logits(inputs, at)
    return Outcome(logits, loss.detach(), gradients(model))


def assert_gradients_agree(got: Gradients, want: Gradients) -> None:
    """Every gradient within 1e-5 of its norm plus 1e-6 of the norm of all, fp32's own noise."""
    assert got.keys() == want.keys()
    none = {name for name, gradient in want.items() if gradient is None}
    assert {name for name, gradient in got.items() if gradient is None} == none
    pairs = {name: (got[name].double(), want[name].double()) for name in want.keys() - none}
    total = torch.stack([wanted.norm() for _, wanted in pairs.values()]).norm()
    wrong = {
        name: (float((mine - wanted).norm()), float(wanted.norm()))
        for name, (mine, wanted) in pairs.items()
        if not (mine - wanted).norm() <= 1e-5 * wanted.norm() + 1e-6 * total
    }
    assert not wrong, f"norm of difference and of reference, all of them {float(total)}: {wrong}"
    for name, (mine, wanted) in pairs.items():
        if name.endswith(("embed_tokens.weight", "pos_embed.weight", "gate_up_proj", "down_proj")):
            unused = (wanted == 0).flatten(1).all(1)
            assert not mine[unused].any(), f"{name}: rows that nothing uses have gradients"


def assert_outcomes_agree(got: Outcome, want: Outcome) -> None:
    """Logits and loss to fp32's own noise, gradients as above."""
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(got.loss, want.loss, rtol=2e-6, atol=0)
    assert_gradients_agree(got.gradients, want.gradients)
