"""A small config without two dims alike, and rows with positions worked out by hand."""

from dataclasses import dataclass

import numpy as np

from model.config.config import Config
from model.data.sample import Sample
from vlshard.plan.header import Grid

RAW = {
    "model_type": "qwen3_vl_moe",
    "tie_word_embeddings": False,
    "image_token_id": 100,
    "video_token_id": 101,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
    "text_config": {
        "vocab_size": 104,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 4, 4]},
    },
    "vision_config": {
        "depth": 3,
        "patch_size": 4,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    },
}
CONFIG = Config.from_dict(RAW)


@dataclass(frozen=True)
class Row:
    """A row in short notation and the positions of its tokens.

    ``tokens``: ``V`` vision start, ``I`` image and ``D`` video placeholder (``I*6``: six of them),
    ``E`` vision end, numbers are text.
    """

    tokens: str
    grids: tuple[Grid, ...]
    t: str
    h: str
    w: str

    def ids(self, config: Config) -> np.ndarray:
        """Token ids."""
        named = {
            "V": config.vision_start_token_id,
            "I": config.image_token_id,
            "D": config.video_token_id,
            "E": config.vision_end_token_id,
        }
        parts = [(part + "*1").split("*") for part in self.tokens.split()]
        ids = [named.get(part[0]) or int(part[0]) for part in parts]
        return np.repeat(np.array(ids, dtype=np.int64), [int(part[1]) for part in parts])

    def sample(self, config: Config, labelled: list[int] | None = None) -> Sample:
        """The row with labels at some of its tokens, or at all text tokens."""
        ids = self.ids(config)
        text = [i for i, token in enumerate(ids) if token < config.image_token_id]
        labels = np.full_like(ids, -100)
        chosen = text if labelled is None else labelled
        labels[chosen] = ids[chosen]
        return Sample(ids, labels, self.grids)

    @property
    def positions(self) -> np.ndarray:
        """Positions in time, height and width."""
        return np.array([[int(x) for x in axis.split()] for axis in (self.t, self.h, self.w)])


T1 = Row(
    "1 2 3 V I*6 E 4 5",
    ((1, 4, 6),),
    "0 1 2 3 4 4 4 4 4 4 7 8 9",
    "0 1 2 3 4 4 4 5 5 5 7 8 9",
    "0 1 2 3 4 5 6 4 5 6 7 8 9",
)
T2 = Row(
    "1 V I*4 E V I*3 E 2",
    ((1, 4, 4), (1, 2, 6)),
    "0 1 2 2 2 2 4 5 6 6 6 9 10",
    "0 1 2 2 3 3 4 5 6 6 6 9 10",
    "0 1 2 3 2 3 4 5 6 7 8 9 10",
)
T3 = Row(
    "1 5 6 V D*4 E 7 8 V D*4 E 9 9 V D*4 E 2",
    ((3, 4, 4),),
    "0 1 2 3 4 4 4 4 6 7 8 9 10 10 10 10 12 13 14 15 16 16 16 16 18 19",
    "0 1 2 3 4 4 5 5 6 7 8 9 10 10 11 11 12 13 14 15 16 16 17 17 18 19",
    "0 1 2 3 4 5 4 5 6 7 8 9 10 11 10 11 12 13 14 15 16 17 16 17 18 19",
)
T4 = Row(
    "1 V I*4 E 5 V D*2 E 6 V D*2 E 2",
    ((1, 4, 4), (2, 2, 4)),
    "0 1 2 2 2 2 4 5 6 7 7 9 10 11 12 12 14 15",
    "0 1 2 2 3 3 4 5 6 7 7 9 10 11 12 12 14 15",
    "0 1 2 3 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
)
T5_FIRST = Row(
    "1 5 V D*2 E 2",
    ((1, 2, 4),),
    "0 1 2 3 3 5 6",
    "0 1 2 3 3 5 6",
    "0 1 2 3 4 5 6",
)
T5_SECOND = Row(
    "1 5 V D*2 E 6 V D*2 E 2",
    ((2, 2, 4),),
    "0 1 2 3 3 5 6 7 8 8 10 11",
    "0 1 2 3 3 5 6 7 8 8 10 11",
    "0 1 2 3 4 5 6 7 8 9 10 11",
)
PACKED_FIRST = Row(
    "1 V I*4 E 2", ((1, 4, 4),), "0 1 2 2 2 2 4 5", "0 1 2 2 3 3 4 5", "0 1 2 3 2 3 4 5"
)
PACKED_SECOND = Row(
    "3 4 V I*4 E 5", ((1, 4, 4),), "0 1 2 3 3 3 3 5 6", "0 1 2 3 3 4 4 5 6", "0 1 2 3 4 3 4 5 6"
)
ROWS = {
    "T1": T1,
    "T2": T2,
    "T3": T3,
    "T4": T4,
    "T5 first": T5_FIRST,
    "T5 second": T5_SECOND,
    "packed first": PACKED_FIRST,
    "packed second": PACKED_SECOND,
}
