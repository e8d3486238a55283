"""The decoder as pure functions on b rows of s tokens.

Dims: b rows, s positions, m model width, h q heads, kv kv heads, d head width, t real tokens,
v visual tokens, y labelled tokens, f MLP width.
"""

import einops
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from model.moe import Kept, Load, moe
from model.params import AttentionParams, MlpParams, MoeParams, TextBlockParams
from model.rope import Rope, rotate
from model.vision import heads
from vlshard import Boundaries


def embed_tokens(
    table: Float[Tensor, "vocab m"],
    ids: Int[Tensor, "b s"],
    *,
    padding_id: int | None,
    at: Boundaries,
) -> Float[Tensor, "b s m"]:
    """Look tokens up.

    Args:
      table: one row per token id, or this rank's part of them.
      ids: token ids.
      padding_id: id whose row learns nothing here, if any.
      at: where rows of the table travel.
    Returns: one row per token, in the table's dtype.
    """
    return at.fetch("text.vocab", table, ids, padding_id)


def rms_norm(
    x: Float[Tensor, "*rows d"], weight: Float[Tensor, " d"], *, eps: float
) -> Float[Tensor, "*rows d"]:
    """Root-mean-square norm in fp32, scaled in x's dtype.

    Args:
      x: rows to norm.
      weight: scale of each feature.
      eps: added to the mean square.
    Returns: normed rows; same dtype as x.
    Source: transformers 5.24, Qwen3VLMoeTextRMSNorm.
    """
    return weight * F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype)


def place_visual(
    embeds: Float[Tensor, "b s m"], rows: Float[Tensor, "v m"], visual: Int[Tensor, " v"]
) -> Float[Tensor, "b s m"]:
    """Put visual tokens where their placeholders are.

    Args:
      embeds: embedded tokens.
      rows: visual tokens in reading order.
      visual: index of each placeholder in the flat b*s rows.
    Returns: embeds with these rows replaced; same dtype as embeds.
    """
    b, s = embeds.shape[:2]
    flat = einops.rearrange(embeds, "b s m -> (b s) m")
    return _rows(flat.index_copy(0, visual, rows.to(flat.dtype)), b, s)


def add_visual(
    hidden: Float[Tensor, "b s m"], rows: Float[Tensor, "v m"], visual: Int[Tensor, " v"]
) -> Float[Tensor, "b s m"]:
    """Add one DeepStack level to the placeholders' hidden states.

    Args:
      hidden: states after a decoder layer.
      rows: that level's visual tokens in reading order.
      visual: index of each placeholder in the flat b*s rows.
    Returns: hidden with these rows added; same dtype as hidden.
    """
    b, s = hidden.shape[:2]
    flat = einops.rearrange(hidden, "b s m -> (b s) m")
    return _rows(flat.index_add(0, visual, rows.to(flat.dtype)), b, s)


def text_attention(
    params: AttentionParams,
    q_norm_w: Float[Tensor, " d"],
    k_norm_w: Float[Tensor, " d"],
    x: Float[Tensor, "b s m"],
    rope: Rope,
    *,
    eps: float,
    at: Boundaries,
) -> Float[Tensor, "b s m"]:
    """Causal attention with grouped keys and values; queries and keys are normed per head.

    Args:
      params: projections.
      q_norm_w: scale of a query's features.
      k_norm_w: scale of a key's features.
      x: normed tokens of this rank.
      rope: phases of the tokens that attention computes on.
      eps: of the norms.
      at: where queries, keys and values travel.
    Returns: one row per token; same dtype as x.
    Source: transformers 5.24, Qwen3VLMoeTextAttention.
    """
    width = len(q_norm_w)
    x = at.enter("text.attention", x)
    k = at.start("text.k", rotate(rms_norm(heads(x, params.k, width), k_norm_w, eps=eps), rope))
    v = at.start("text.v", heads(x, params.v, width))
    q = at.start("text.q", rotate(rms_norm(heads(x, params.q, width), q_norm_w, eps=eps), rope))
    out = einops.rearrange(at.attend("text", q, k, v), "b s h d -> b s (h d)")
    out = at.leave("text.attention", F.linear(out, params.out.w))
    return out if params.out.b is None else out + params.out.b


def mlp(params: MlpParams, x: Float[Tensor, "b s m"], *, at: Boundaries) -> Float[Tensor, "b s m"]:
    """A gated MLP on every token.

    Args:
      params: gate, up and down projections.
      x: normed tokens of this rank.
      at: where tokens travel.
    Returns: one row per token; same dtype as x.
    Source: transformers 5.24, Qwen3VLMoeTextMLP.
    """
    x = at.enter("text.mlp", x)
    inner = F.silu(F.linear(x, params.gate_w)) * F.linear(x, params.up_w)
    return at.leave("text.mlp", F.linear(inner, params.down_w))


def sparse_mlp(
    params: MoeParams,
    x: Float[Tensor, "b s m"],
    real: Int[Tensor, " t"],
    *,
    top_k: int,
    at: Boundaries,
    kept: Kept | None = None,
) -> tuple[Float[Tensor, "b s m"], Load]:
    """Experts on the tokens that are no padding; padding gets zeros.

    Args:
      params: router and experts.
      x: normed tokens.
      real: indices of tokens that are no padding in the flat b*s rows.
      top_k: experts per token.
      at: where tokens travel.
      kept: what an earlier run on the same tokens decided, or where this one keeps it.
    Returns: one row per token, same dtype as x, and the load of the experts.
    """
    b, s = x.shape[:2]
    flat = einops.rearrange(x, "b s m -> (b s) m")
    out, load = moe(params, flat, real, top_k=top_k, at=at, kept=kept)
    return _rows(out, b, s), load


def text_block(
    params: TextBlockParams,
    x: Float[Tensor, "b s m"],
    rope: Rope,
    real: Int[Tensor, " t"],
    *,
    eps: float,
    top_k: int,
    at: Boundaries,
    kept: Kept | None = None,
) -> tuple[Float[Tensor, "b s m"], Load | None]:
    """One decoder layer: attention, then an MLP or experts, each added to its input.

    Args:
      params: the layer's weights; their class says whether it has experts.
      x: tokens of this rank.
      rope: phases of the tokens that attention computes on.
      real: indices of tokens that are no padding in the flat b*s rows.
      eps: of the norms.
      top_k: experts per token.
      at: where queries, keys, values and tokens travel.
      kept: what an earlier run on the same tokens decided, or where this one keeps it.
    Returns: one row per token, same dtype as x, and the experts' load (None for an MLP).
    Source: transformers 5.24, Qwen3VLMoeTextDecoderLayer.
    """
    normed = rms_norm(x, params.norm1_w, eps=eps)
    norms = params.q_norm_w, params.k_norm_w
    x = x + text_attention(params.attn, *norms, normed, rope, eps=eps, at=at)
    normed = rms_norm(x, params.norm2_w, eps=eps)
    if isinstance(params.mlp, MlpParams):
        return x + mlp(params.mlp, normed, at=at), None
    out, load = sparse_mlp(params.mlp, normed, real, top_k=top_k, at=at, kept=kept)
    return x + out, load


def labelled_rows(
    hidden: Float[Tensor, "b s m"], labelled: Int[Tensor, " y"]
) -> Float[Tensor, "y m"]:
    """The states of the tokens that have a target.

    Args:
      hidden: states of all tokens.
      labelled: indices in the flat b*s rows.
    """
    return einops.rearrange(hidden, "b s m -> (b s) m").index_select(0, labelled)


def _rows(flat: Float[Tensor, "t m"], b: int, s: int) -> Float[Tensor, "b s m"]:
    """Flat tokens as rows again; no rows at all included."""
    return einops.rearrange(flat, "(b s) m -> b s m", b=b, s=s)
