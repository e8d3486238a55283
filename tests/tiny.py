"""Tiny models and batches in one process: config, samples, pixels, inputs."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.config.config import Config
from model.data.inputs import ModelInputs, build_inputs
from model.data.sample import IGNORED, Sample, sample_facts
from vlshard.plan.boundaries import LocalBoundaries, local_boundaries
from vlshard.plan.header import Grid, Share, StepHeader, make_headers
from vlshard.pytree import tree_leaves

IMAGE, VIDEO, START, END = 90, 91, 92, 93

TINY: dict[str, Any] = {
    "model_type": "qwen3_vl_moe",
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.05,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl_moe_vision",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1, 2],
    },
}


def tiny_raw(
    text: Mapping[str, Any] | None = None, vision: Mapping[str, Any] | None = None, **outer: Any
) -> dict[str, Any]:
    """A tiny config.json without square traps, with these settings replaced."""
    raw = copy.deepcopy(TINY) | outer
    raw["text_config"] |= text or {}
    raw["vision_config"] |= vision or {}
    return raw


@cache
def tiny_config() -> Config:
    """The config of runs from initialised weights, spread enough to tell layers apart."""
    spread = {"initializer_range": 0.08}
    return Config.from_dict(tiny_raw(text=spread, vision=spread))


def image(grid: Grid, merge: int = 2) -> list[int]:
    """Tokens of one image."""
    return [START, *[IMAGE] * (grid[0] * grid[1] * grid[2] // merge**2), END]


def frame(grid: Grid, merge: int = 2) -> list[int]:
    """Tokens of one frame of a video, without its timestamp."""
    return [START, *[VIDEO] * (grid[1] * grid[2] // merge**2), END]


def sample(ids: Sequence[int], *grids: Grid, labels: Sequence[int] | None = None) -> Sample:
    """A sample; unless told otherwise every token that is no visual one is labelled."""
    if labels is None:
        labels = [IGNORED if token >= IMAGE else token for token in ids]
    return Sample(np.array(ids), np.array(labels), tuple(grids))


def pixels_of(
    samples: Sequence[Sample], width: int, seed: int = 1
) -> dict[tuple[int, int], Tensor]:
    """Random patches of every item, keyed by (sample, item)."""
    draw = torch.Generator().manual_seed(seed)
    return {
        (i, j): torch.randn(t * h * w, width, generator=draw)
        for i, sample in enumerate(samples)
        for j, (t, h, w) in enumerate(sample.grids)
    }


def whole_share(header: StepHeader) -> Share:
    """The share of a process that holds everything: rows padded to the longest sample."""
    samples, positions = np.indices((len(header.samples), header.longest))
    return Share(np.arange(sum(header.segments)), samples, positions, header.visual)


@dataclass(frozen=True)
class Batch:
    """One batch for both models: a single process holds all of it."""

    samples: tuple[Sample, ...]
    pixels: dict[tuple[int, int], Tensor]
    config: Config

    @property
    def header(self) -> StepHeader:
        """What every rank knows of the batch."""
        facts = [sample_facts(sample, i, self.config) for i, sample in enumerate(self.samples)]
        return make_headers(facts, 1)[0]

    @property
    def inputs(self) -> ModelInputs:
        """The whole batch as this project's model takes it."""
        header = self.header
        chosen = dict(enumerate(self.samples))
        return build_inputs(header, whole_share(header), chosen, self.pixels, self.config)

    @property
    def at(self) -> LocalBoundaries:
        """No plan."""
        return local_boundaries(self.header.segments)


def make_batch(config: Config, *samples: Sample, seed: int = 1) -> Batch:
    """A batch with random pixels."""
    return Batch(samples, pixels_of(samples, config.vision.patch_width, seed), config)


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.found.add(tuple(leaf.shape))
        return out
