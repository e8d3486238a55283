"""What the benchmarks compute: configs, samples and weights that depend on names and seeds alone.

Published workloads, W1 (almost all vocabulary table), W2 (three pictures of different sizes each)
and W3D (almost all decoder, without experts), one in which the vision encoder is the larger part,
and one whose samples have a picture each that is four times as large in one as in the next. A
sample's loss is the mean over its labelled tokens; all samples have equally many, so that is the
mean over all tokens too.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SEED = 1234
BATCH = 2
OPTIMIZER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "fused": True}
CLIP = 1.0
IGNORED = -100
SHARED_TEXT = {
    "model_type": "qwen3_vl_moe_text",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.0,
    "max_position_embeddings": 32768,
    "use_cache": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SHARED_VISION = {
    "model_type": "qwen3_vl_moe_vision",
    "in_channels": 3,
    "temporal_patch_size": 2,
    "hidden_act": "gelu_pytorch_tanh",
}


def text_config(mrope: list[int], **settings: int) -> dict[str, Any]:
    """The text half of a config.json."""
    rope = {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_section": mrope,
        "mrope_interleaved": True,
    }
    return {**SHARED_TEXT, **settings, "rope_parameters": rope}


@dataclass(frozen=True)
class Workload:
    """A model and how its samples look.

    Attributes:
      length: tokens of a sample.
      grids: frames, rows and columns of its pictures, in an order drawn anew for each sample.
      gaps: text tokens before the first picture and behind each.
      text: text half of the config.
      vision: vision half of the config.
      ids: placeholder, start and end ids, and the first id that no text token has.
      ragged: a sample has one of the pictures, the next sample the next one.
    """

    length: int
    grids: tuple[tuple[int, int, int], ...]
    gaps: tuple[int, ...]
    text: dict[str, Any] = field(hash=False)
    vision: dict[str, Any] = field(hash=False)
    ids: dict[str, int] = field(hash=False)
    ragged: bool = False

    @property
    def raw(self) -> dict[str, Any]:
        """The model's config.json."""
        return {
            "model_type": "qwen3_vl_moe",
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "image_token_id": self.ids["image"],
            "video_token_id": self.ids["video"],
            "vision_start_token_id": self.ids["start"],
            "vision_end_token_id": self.ids["end"],
            "tie_word_embeddings": False,
            "text_config": self.text,
            "vision_config": {**SHARED_VISION, **self.vision},
        }


BIG = {"image": 151655, "video": 151656, "start": 151652, "end": 151653, "text": 151643}
SMALL = {"image": 8190, "video": 8191, "start": 8188, "end": 8189, "text": 8188}
W2_TEXT = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
TOWER = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_heads": 8,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "out_hidden_size": 256,
    "num_position_embeddings": 2304,
}
WORKLOADS = {
    "W1": Workload(
        length=32,
        grids=((2, 2, 2),),
        gaps=(4, 18),
        text=text_config(
            [4, 2, 2],
            vocab_size=151936,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
        vision={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": 1,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
        },
        ids=BIG,
    ),
    "W2": Workload(
        length=1024,
        grids=((1, 32, 48), (1, 20, 28), (1, 16, 16)),
        gaps=(40, 60, 80, 250),
        text=text_config([6, 5, 5], **W2_TEXT),
        vision={**TOWER, "depth": 6, "deepstack_visual_indexes": [1, 3, 5]},
        ids=SMALL,
    ),
    # Decoder heavy, with dense MLPs in every layer.
    "W3D": Workload(
        length=1024,
        grids=((1, 16, 16),),
        gaps=(58, 900),
        text={
            **text_config(
                [12, 10, 10],
                vocab_size=8192,
                hidden_size=512,
                intermediate_size=1024,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=64,
                num_experts=32,
                num_experts_per_tok=4,
                moe_intermediate_size=256,
            ),
            "mlp_only_layers": [0, 1, 2, 3],
        },
        vision={
            "depth": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "out_hidden_size": 512,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        ids=SMALL,
    ),
    "vision": Workload(
        length=1344,
        grids=((1, 32, 32), (1, 64, 64)),
        gaps=(20, 20, 20),
        text=text_config([6, 5, 5], **{**W2_TEXT, "num_hidden_layers": 3}),
        vision={**TOWER, "depth": 12, "deepstack_visual_indexes": [3, 7, 11]},
        ids=SMALL,
    ),
    "ragged": Workload(
        length=1066,
        grids=((1, 32, 32), (1, 64, 64)),
        gaps=(20, 20),
        text=text_config([6, 5, 5], **{**W2_TEXT, "num_hidden_layers": 3}),
        vision={**TOWER, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
        ids=SMALL,
        ragged=True,
    ),
}


def weight(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The first value of a parameter, from its name and shape alone; norms are near 1."""
    draw = torch.Generator().manual_seed((SEED << 32) ^ zlib.crc32(name.encode()))
    drawn = torch.randn(tuple(shape), generator=draw) * 0.02
    return drawn + 1.0 if name.endswith(".weight") and len(shape) == 1 else drawn


@dataclass(frozen=True)
class Drawn:
    """One sample: ids and labels of its tokens, grids and pixels of its pictures in order."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...]
    pixels: Tensor

    def starts(self, workload: Workload) -> tuple[int, ...]:
        """Where the placeholders of each frame start."""
        merge = workload.vision["spatial_merge_size"] ** 2
        found: list[int] = []
        at = 0
        for (t, h, w), gap in zip(self.grids, workload.gaps[:-1], strict=True):
            at += gap + 1
            found += [at + frame * (h * w // merge) for frame in range(t)]
            at += t * h * w // merge + 1
        return tuple(found)


def draw_sample(workload: Workload, index: int) -> Drawn:
    """The sample with a number; which pictures it has, or in what order, depends on it.

    Its length and the number of its labels do not.
    """
    draw = torch.Generator().manual_seed(SEED * 1_000_003 + index)
    order = torch.randperm(len(workload.grids), generator=draw).tolist()
    grids = tuple(workload.grids[i] for i in order)
    if workload.ragged:
        grids = (workload.grids[index % len(workload.grids)],)
    ids, labels = [], []
    merge = workload.vision["spatial_merge_size"] ** 2
    for gap, grid in zip(workload.gaps, (*grids, None), strict=True):
        words = torch.randint(0, workload.ids["text"], (gap,), generator=draw).tolist()
        ids, labels = ids + words, labels + words
        if grid is not None:
            run = [workload.ids["image"]] * (grid[0] * grid[1] * grid[2] // merge)
            ids += [workload.ids["start"], *run, workload.ids["end"]]
            labels += [IGNORED] * (len(run) + 2)
    vision = {**SHARED_VISION, **workload.vision}
    values = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(patches, values, generator=draw)
    if workload.ragged:
        rest = workload.length - len(ids)
        ids += torch.randint(0, workload.ids["text"], (rest,), generator=draw).tolist()
        labels += [IGNORED] * rest
    assert len(ids) == workload.length
    return Drawn(tuple(ids), tuple(labels), grids, pixels)
