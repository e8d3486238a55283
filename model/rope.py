"""Rotary positions: two axes for patches, three interleaved ones for tokens. Phases are fp32."""

import einops
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlshard.pytree import pytree


@pytree
class Rope:
    """Cosine and sine of each row's phases, one per pair of features; fp32."""

    cos: Float[Tensor, "*rows f"]
    sin: Float[Tensor, "*rows f"]


def frequencies(width: int, theta: float, device: torch.device) -> Float[Tensor, " f"]:
    """Angular frequencies for ``width`` features, fastest first; fp32.

    Args:
      width: features that turn, two per frequency.
      theta: base of the geometric series.
      device: where to put them.
    """
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    return 1.0 / (theta ** (steps / width))


def vision_rope(coords: Int[Tensor, "n 2"], *, width: int, theta: float) -> Rope:
    """Phases of patches: the first half of a head's frequencies turns with rows, then columns.

    Args:
      coords: row and column of each patch in its frame [patches].
      width: width of a head, a multiple of 4.
      theta: base of the frequencies.
    Returns: one row per patch, width / 2 phases.
    Source: transformers 5.24, Qwen3VLMoeVisionRotaryEmbedding.
    """
    axes = einops.rearrange(coords.float(), "n two -> n two 1")
    phases = einops.rearrange(
        axes * frequencies(width // 2, theta, coords.device), "n two f -> n (two f)"
    )
    return Rope(phases.cos(), phases.sin())


def slot_axes(sections: tuple[int, int, int], device: torch.device) -> Int[Tensor, " f"]:
    """Which of the three position axes feeds each frequency.

    Args:
      sections: frequencies per axis (time, rows, columns); they alternate T H W T H W ... until
        rows and columns have theirs, the rest is time's.
      device: where to put them.
    """
    slots = torch.arange(sum(sections), device=device)
    axis = slots % 3
    rows = (axis == 1) & (slots < 3 * sections[1])
    columns = (axis == 2) & (slots < 3 * sections[2])
    return rows.long() + 2 * columns.long()


def text_rope(
    positions: Int[Tensor, "3 b s"], *, sections: tuple[int, int, int], theta: float
) -> Rope:
    """Phases of tokens with interleaved axes.

    Args:
      positions: time, row and column position of each token.
      sections: frequencies per axis; their sum is half a head's width.
      theta: base of the frequencies.
    Returns: b rows of s positions, one phase per frequency.
    Source: transformers 5.24, Qwen3VLMoeTextRotaryEmbedding.
    """
    fed = positions.float().index_select(0, slot_axes(sections, positions.device))
    speed = frequencies(2 * sum(sections), theta, positions.device)
    phases = einops.rearrange(fed, "f b s -> b s f") * speed
    return Rope(phases.cos(), phases.sin())


def rotate(x: Float[Tensor, "*rows h d"], rope: Rope) -> Float[Tensor, "*rows h d"]:
    """Turn every head by its row's phases; feature i is paired with feature i + width / 2.

    Args:
      x: queries or keys.
      rope: phases, one row per row of x.
    Returns: the turned heads, computed in fp32; same dtype as x.
    """
    cos, sin = (einops.rearrange(part, "... f -> ... 1 f") for part in (rope.cos, rope.sin))
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
