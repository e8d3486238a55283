"""The vision tower as pure functions on a pack of patches.

Rows are patches in merge-unit order, one frame after another; which frames and how long they are
is known to ``at`` alone. Dims: n patches, c width, h heads, d head width, m model width.
"""

import einops
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from model.params import (
    AttentionParams,
    EmbedParams,
    LinearParams,
    MergerParams,
    NormParams,
    VisionBlockParams,
)
from model.rope import Rope, rotate
from vlshard import Boundaries

NORM_EPS = 1e-6


def embed_patches(
    params: EmbedParams,
    pixels: Float[Tensor, "n p"],
    corners: Int[Tensor, "n 4"],
    corner_weights: Float[Tensor, "n 4"],
) -> Float[Tensor, "n c"]:
    """Embed flat patches and add the position table, interpolated at each patch.

    Args:
      params: projection and position table.
      pixels: values of each patch, channel by channel, then frame, row and column.
      corners: four nearest places of the table.
      corner_weights: bilinear weight of each; fp32.
    Returns: one row per patch, in the parameters' dtype.
    Source: transformers 5.24, Qwen3VLMoeVisionPatchEmbed: a convolution whose stride is its kernel
      is one linear map of the flat patch.
    """
    flat = einops.rearrange(params.proj_w, "c ch frame row column -> c (ch frame row column)")
    patches = F.linear(pixels.to(flat.dtype), flat, params.proj_b)
    places = F.embedding(corners, params.table)
    weights = einops.rearrange(corner_weights, "n corner -> n corner 1")
    table = einops.reduce(places * weights, "n corner c -> n c", "sum")
    return patches + table.to(patches.dtype)


def heads(
    x: Float[Tensor, "*rows m"], params: LinearParams, width: int
) -> Float[Tensor, "*rows h d"]:
    """Project rows to heads of ``width`` features."""
    return einops.rearrange(F.linear(x, params.w, params.b), "... (h d) -> ... h d", d=width)


def layer_norm(x: Float[Tensor, "*rows c"], params: NormParams) -> Float[Tensor, "*rows c"]:
    """Layer norm over features."""
    return F.layer_norm(x, params.w.shape, params.w, params.b, eps=NORM_EPS)


def vision_attention(
    params: AttentionParams, x: Float[Tensor, "n c"], rope: Rope, *, width: int, at: Boundaries
) -> Float[Tensor, "n c"]:
    """Attention among all patches of a frame.

    Args:
      params: projections.
      x: normed patches of this rank.
      rope: phases of the patches that attention computes on.
      width: width of a head.
      at: where queries, keys and values travel.
    Returns: one row per patch; same dtype as x.
    Source: transformers 5.24, Qwen3VLMoeVisionAttention.
    """
    x = at.enter("vision.attention", x)
    k = at.start("vision.k", rotate(heads(x, params.k, width), rope))
    v = at.start("vision.v", heads(x, params.v, width))
    q = at.start("vision.q", rotate(heads(x, params.q, width), rope))
    out = einops.rearrange(at.attend("vision", q, k, v), "n h d -> n (h d)")
    out = at.leave("vision.attention", F.linear(out, params.out.w))
    return out if params.out.b is None else out + params.out.b


def vision_mlp(
    fc1: LinearParams, fc2: LinearParams, x: Float[Tensor, "n c"], *, at: Boundaries
) -> Float[Tensor, "n c"]:
    """An MLP on every patch.

    Args:
      fc1: projection to the inner width.
      fc2: projection back.
      x: normed patches of this rank.
      at: where patches travel.
    Returns: one row per patch; same dtype as x.
    Source: transformers 5.24, Qwen3VLMoeVisionMLP.
    """
    inner = F.linear(at.enter("vision.mlp", x), fc1.w, fc1.b)
    out = at.leave("vision.mlp", F.linear(F.gelu(inner, approximate="tanh"), fc2.w))
    return out if fc2.b is None else out + fc2.b


def vision_block(
    params: VisionBlockParams, x: Float[Tensor, "n c"], rope: Rope, *, width: int, at: Boundaries
) -> Float[Tensor, "n c"]:
    """One block: attention, then an MLP, each added to its input.

    Args:
      params: the block's weights.
      x: patches of this rank.
      rope: phases of the patches that attention computes on.
      width: width of a head.
      at: where queries, keys and values travel.
    Returns: one row per patch; same dtype as x.
    Source: transformers 5.24, Qwen3VLMoeVisionBlock.
    """
    x = x + vision_attention(params.attn, layer_norm(x, params.norm1), rope, width=width, at=at)
    return x + vision_mlp(params.fc1, params.fc2, layer_norm(x, params.norm2), at=at)


def merge_patches(
    params: MergerParams, patches: Float[Tensor, "n c"], *, merge: int
) -> Float[Tensor, "n//{merge}**2 m"]:
    """Fold every merge unit into one visual token, keeping unit order; patches are normed.

    Args:
      params: merger weights, the norm as wide as a patch.
      patches: rows k*merge**2 ... (k+1)*merge**2 - 1 are unit k.
      merge: side of a merge unit [patches].
    Returns: one row per unit; same dtype as patches.
    Raises: EinopsError if n is no multiple of merge**2.
    Source: transformers 5.24, Qwen3VLMoeVisionPatchMerger (norm before the fold).
    """
    units = _fold(layer_norm(patches, params.norm), merge)
    return _project(params, units)


def merge_units(
    params: MergerParams, patches: Float[Tensor, "n c"], *, merge: int
) -> Float[Tensor, "n//{merge}**2 m"]:
    """Fold every merge unit into one visual token for DeepStack; whole units are normed.

    Args:
      params: merger weights, the norm as wide as a unit.
      patches: rows k*merge**2 ... (k+1)*merge**2 - 1 are unit k.
      merge: side of a merge unit [patches].
    Returns: one row per unit; same dtype as patches.
    Raises: EinopsError if n is no multiple of merge**2.
    Source: transformers 5.24, Qwen3VLMoeVisionPatchMerger (norm after the fold).
    """
    return _project(params, layer_norm(_fold(patches, merge), params.norm))


def _fold(patches: Float[Tensor, "n c"], merge: int) -> Float[Tensor, "units u"]:
    """The rows of each merge unit, side by side."""
    return einops.rearrange(patches, "(unit patch) c -> unit (patch c)", patch=merge**2)


def _project(params: MergerParams, units: Float[Tensor, "units u"]) -> Float[Tensor, "units m"]:
    """The merger's MLP."""
    inner = F.gelu(F.linear(units, params.fc1.w, params.fc1.b))
    return F.linear(inner, params.fc2.w, params.fc2.b)
