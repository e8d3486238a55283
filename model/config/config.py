"""What a checkpoint's config.json says of the model, checked, as frozen numbers."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from model.config.files import quoted, read_json
from model.config.insides import (
    text_attention,
    text_experts,
    text_mlp,
    text_vocab,
    vision_attention,
    vision_mlp,
)
from model.config.json_settings import Settings
from model.config.sections import (
    MODEL_TYPE,
    TextConfig,
    VisionConfig,
    contradictions,
    read_text,
    read_vision,
)
from model.config.shapes import Shape, layer_shapes, prefixed, vision_shapes
from vlshard import Heads, Inside
from vlshard.language import clipped, clipped_lines

ARCHITECTURE = "Qwen3VLMoeForConditionalGeneration"
MOST_PARAMETERS = 10**14

BOUNDARIES: Mapping[str, str] = MappingProxyType(
    {
        "vision.patches": "(img s) c",
        **{f"vision.{name}": "(img s) h d" for name in ("q", "k", "v", "out")},
        "vision.merged": "(img s) m",
        "text.tokens": "b s m",
        **{f"text.{name}": "b s h d" for name in ("q", "out")},
        **{f"text.{name}": "b s kv d" for name in ("k", "v")},
        "text.logits": "t vocab",
    }
)


class ConfigError(ValueError):
    """A config.json that cannot be read, or that asks for what this model does not do."""


@dataclass(frozen=True)
class Config:
    """The whole model.

    Attributes:
      vision: the vision tower.
      text: the decoder.
      image_token_id: placeholder of one visual token of an image.
      video_token_id: placeholder of one visual token of a video.
      vision_start_token_id: token before each run of placeholders.
      vision_end_token_id: token behind each run of placeholders.
      tie_word_embeddings: whether the head is the embedding; the outer setting of the file.
      raw: content of config.json as it was read, to be written back; not part of equality.
    """

    vision: VisionConfig
    text: TextConfig
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    tie_word_embeddings: bool
    raw: dict[str, Any] = field(compare=False, repr=False)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, where: str = "config") -> "Config":
        """The config that the content of a config.json describes.

        Keys that are absent have the values that transformers gives them.

        Args:
          raw: content of config.json, in transformers 4.57's or 5's spelling.
          where: name of the file, for the error message.
        Returns: the checked config; ``raw`` is copied into it.
        Raises: ConfigError naming everything that is malformed or not supported.
        Source: transformers 5.24, Qwen3VLMoeConfig.
        """
        problems: list[str] = []
        outer = Settings(raw, problems)
        if raw.get("model_type") != MODEL_TYPE:
            found = quoted(raw.get("model_type"))
            problems.append(f"model_type is {found}, not {MODEL_TYPE!r}")
            raise _error(where, problems)
        config = cls(
            vision=read_vision(outer.section("vision_config")),
            text=read_text(outer.section("text_config")),
            image_token_id=outer.integer("image_token_id", 151655, least=0),
            video_token_id=outer.integer("video_token_id", 151656, least=0),
            vision_start_token_id=outer.integer("vision_start_token_id", 151652, least=0),
            vision_end_token_id=outer.integer("vision_end_token_id", 151653, least=0),
            tie_word_embeddings=outer.flag("tie_word_embeddings", False),
            raw=copy.deepcopy(raw),
        )
        if outer.get("quantization_config") is not None:
            problems.append("quantization_config: quantised weights are not read")
        if not problems:
            problems += [*_same_tokens(config), *contradictions(config.vision, config.text)]
        if not problems:
            problems += _too_large(config)
        if problems:
            raise _error(where, problems)
        return config

    @property
    def boundaries(self) -> Mapping[str, str]:
        """Dims of each boundary at which a plan may change the layout."""
        return BOUNDARIES

    @property
    def heads(self) -> Mapping[str, Heads]:
        """Heads of each attention site."""
        vision, text = self.vision, self.text
        return {
            "vision": Heads(vision.num_heads, vision.num_heads, vision.head_dim),
            "text": Heads(text.num_attention_heads, text.num_key_value_heads, text.head_dim),
        }

    @property
    def unit(self) -> int:
        """Patches that are merged into one visual token."""
        return self.vision.unit

    @property
    def patch_cost(self) -> tuple[float, float]:
        """Multiplications of a vision block for a frame of n patches, as (a, b) of a n^2 + b n.

        Scores and their use take 2 n^2 c; projections 4 n c^2, the MLP 2 n c f.
        """
        c, f = self.vision.hidden_size, self.vision.intermediate_size
        return 2.0 * c, 4.0 * c * c + 2.0 * c * f

    def insides(self) -> Mapping[str, Inside]:
        """What the model computes on dims of its own, by the names by which cores call it."""
        return {
            "text.attention": text_attention(self.text),
            "text.mlp": text_mlp(self.text),
            "text.experts": text_experts(self.text),
            "text.vocab": text_vocab(self.text, tied=self.tie_word_embeddings),
            "vision.attention": vision_attention(self.vision),
            "vision.mlp": vision_mlp(self.vision),
        }

    def units(self) -> tuple[str, ...]:
        """Module paths of the parts whose parameters are stored and gathered together.

        Children come before parents; the root, ``""``, holds what no other part does. A tied
        embedding is the head too, so it lives in the root, which is alive throughout.
        """
        vision, text = "model.visual", "model.language_model"
        return (
            *(f"{vision}.blocks.{i}" for i in range(self.vision.depth)),
            f"{vision}.merger",
            *(
                f"{vision}.deepstack_merger_list.{i}"
                for i in range(len(self.vision.deepstack_visual_indexes))
            ),
            vision,
            *self.lookups(),
            *(f"{text}.layers.{i}" for i in range(self.text.num_hidden_layers)),
            *(() if self.tie_word_embeddings else ("lm_head",)),
            "",
        )

    def lookups(self) -> tuple[str, ...]:
        """The units that only look rows up: an embedding that is not the head too."""
        return () if self.tie_word_embeddings else ("model.language_model.embed_tokens",)

    def parameter_shapes(self) -> dict[str, Shape]:
        """Shape of every parameter under its Hugging Face name, in the model's order.

        Returns: experts as ``gate_up_proj [e, 2 f, m]`` and ``down_proj [e, m, f]``; no
          ``lm_head.weight`` if the head is tied.
        Source: transformers 5.24, Qwen3VLMoeForConditionalGeneration.state_dict().
        """
        text = self.text
        table = (text.vocab_size, text.hidden_size)
        shapes = prefixed("model.visual", vision_shapes(self.vision))
        shapes["model.language_model.embed_tokens.weight"] = table
        for layer in range(text.num_hidden_layers):
            prefix = f"model.language_model.layers.{layer}"
            shapes |= prefixed(prefix, layer_shapes(text, sparse=text.is_sparse(layer)))
        shapes["model.language_model.norm.weight"] = (text.hidden_size,)
        return shapes if self.tie_word_embeddings else shapes | {"lm_head.weight": table}


def load_config(folder: str | Path) -> Config:
    """Read ``config.json`` of a Hugging Face folder.

    Args:
      folder: the folder, or the file itself.
    Raises: ConfigError if the file is missing, is no JSON, or asks for what is not supported.
    """
    path = Path(folder)
    path = path / "config.json" if path.is_dir() or path.suffix != ".json" else path
    try:
        raw = read_json(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no valid JSON: {clipped(error)}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return Config.from_dict(raw, where=str(path))


def _error(where: str, problems: list[str]) -> ConfigError:
    lines = clipped_lines([clipped(problem, 400) for problem in problems])
    return ConfigError("\n  ".join([f"{where}: this model cannot be built", *lines]))


def _same_tokens(config: Config) -> Iterator[str]:
    """Tokens of the vision part that share an id, so that one is taken for the other."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    for one, other in combinations(names, 2):
        if getattr(config, one) == getattr(config, other):
            yield f"{one} = {getattr(config, one)} is {other} too: expected ids of their own"


def _too_large(config: Config) -> Iterator[str]:
    """Sizes that fit one by one, and make a model that no machine holds."""
    count = sum(prod(shape) for shape in config.parameter_shapes().values())
    if count > MOST_PARAMETERS:
        yield f"its sizes make {count:,} parameters, expected at most {MOST_PARAMETERS:,}"
