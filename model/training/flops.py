"""Floating-point operations that a training step asks for, counted from the model's sizes.

A count of what the model needs, whatever a plan or a device makes of it: recomputation, padding and
copies are not counted, nor are norms, activations, softmax and rotations. A multiplication comes
with an addition, so a matrix product [a b] x [b c] is 2 a b c operations; backward takes two such
products for one, those of the input's gradient and the weight's.
"""

from collections.abc import Iterable
from typing import NamedTuple

from model.config import Config, TextConfig, VisionConfig
from vlshard import StepHeader
from vlshard.plan import FactTable

VISION = "model.visual."


class Flops(NamedTuple):
    """Operations of one forward, by part of the model."""

    vision: int
    text: int


def step_flops(config: Config, headers: Iterable[StepHeader], trained: Iterable[str]) -> int:
    """Operations of a training step over all ranks: forward and backward.

    A part of which anything is trained counts three times its forward. A frozen vision tower counts
    once, as nothing flows back through it; a frozen decoder twice, as the tower's gradient does.

    Args:
      config: of the model.
      headers: of the step's micro-batches.
      trained: names of the parameters that are.
    """
    names = set(trained)
    vision = any(name.startswith(VISION) for name in names)
    text = any(not name.startswith(VISION) for name in names)
    total = 0
    for header in headers:
        one = forward_flops(config, header.table)
        total += one.vision * (3 if vision else 1)
        total += one.text * (3 if text else 2 if header.visual and vision else 1)
    return total


def forward_flops(config: Config, table: FactTable) -> Flops:
    """Operations of one forward pass.

    Args:
      config: of the model.
      table: facts of its samples.
    """
    frames = table.frames.prod(axis=1)
    patches, pairs = int(frames.sum()), int((frames**2).sum())
    tokens, labels = int(table.tokens.sum()), int(table.labelled.sum())
    seen = int((table.tokens * (table.tokens + 1)).sum()) // 2  # keys that queries see
    text = config.text
    decoder = sum(_layer(text, tokens, seen, layer) for layer in range(text.num_hidden_layers))
    head = labels * text.hidden_size * text.vocab_size
    return Flops(2 * _tower(config.vision, patches, pairs), 2 * (decoder + head))


def _tower(vision: VisionConfig, patches: int, pairs: int) -> int:
    """Multiplications of the tower for so many patches; ``pairs`` of them are of one frame."""
    c, f, wide = vision.hidden_size, vision.intermediate_size, vision.hidden_size * vision.unit
    block = patches * (4 * c * c + 2 * c * f) + 2 * c * pairs
    mergers = 1 + len(vision.deepstack_visual_indexes)
    merger = patches // vision.unit * (wide * wide + wide * vision.out_hidden_size)
    return patches * vision.patch_width * c + vision.depth * block + mergers * merger


def _layer(text: TextConfig, tokens: int, seen: int, layer: int) -> int:
    """Multiplications of one decoder layer; causal queries see so many keys."""
    m, q = text.hidden_size, text.num_attention_heads * text.head_dim
    kv = text.num_key_value_heads * text.head_dim
    attention = tokens * (2 * m * q + 2 * m * kv) + 2 * q * seen
    if text.is_sparse(layer):
        experts = text.num_experts_per_tok * 3 * m * text.moe_intermediate_size
        return attention + tokens * (m * text.num_experts + experts)
    return attention + tokens * 3 * m * text.intermediate_size
