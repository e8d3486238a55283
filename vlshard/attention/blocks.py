"""Attention to one block of the keys, in parts that can be merged: output and log-sum-exp.

Attention to all keys is put together from attention to blocks of them: the outputs are weighted by
how much of the whole softmax each block's keys have. The backward of a block, given the merged
output and log-sum-exp, gives that block's exact share of the gradients.

Dims: b windows, h heads, l queries, k keys, d head width. Log-sum-exps are in fp32 (fp64 for fp64).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vlshard.comm import HALVES

aten = torch.ops.aten

Queries = Float[Tensor, "b h l d"]
Keys = Float[Tensor, "b h k d"]
Sums = Float[Tensor, "b h l"]


class Part(NamedTuple):
    """Attention to some of the keys: normalised over them, and the log of what it was divided by.

    Where there was no key, the output is 0 and the log-sum-exp is minus infinity.
    """

    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Gradients of queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor


def merge(
    a: Float[Tensor, "*rows d"],
    a_lse: Float[Tensor, "*rows"],
    b: Float[Tensor, "*rows d"],
    b_lse: Float[Tensor, "*rows"],
) -> Part:
    """Attention to the keys of two blocks, from attention to each.

    Args:
      a: output for the first block's keys.
      a_lse: its log-sum-exp; minus infinity where there was no key.
      b: output for the second block's keys.
      b_lse: its log-sum-exp.
    Returns: output and log-sum-exp over both, in the dtype of the log-sum-exps.
    """
    lse = torch.logaddexp(a_lse, b_lse)
    top = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = ((a_lse - top).exp().unsqueeze(-1), (b_lse - top).exp().unsqueeze(-1))
    return Part(a * weights[0] + b * weights[1], lse)


def block_attention(q: Queries, k: Keys, v: Keys, causal: bool) -> Part:
    """Attention to one block of keys, by the device's own kernel where it has one.

    Args:
      q: queries; at least one.
      k: keys, of as many heads; at least one.
      v: values.
      causal: query i sees the first ``i + 1`` keys; there are as many keys as queries.
    Returns: output in q's dtype and log-sum-exp.
    """
    match block_kernel(q.device.type, q.dtype, q.shape[-1]):
        case "cpu flash":
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        case "cuda flash":  # not run on hardware yet
            out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        case _:
            out, lse = written_out(q, k, v, causal)
    return Part(out, lse)


def block_gradients(
    grad: Queries, q: Queries, k: Keys, v: Keys, whole: Part, causal: bool
) -> Gradients:
    """One block's share of the gradients of attention to all keys.

    Args:
      grad: gradient of the merged output.
      q: queries.
      k: the block's keys.
      v: its values.
      whole: merged output (in q's dtype) and log-sum-exp, over all blocks.
      causal: as in ``block_attention``.
    Returns: terms of the gradients of q, k and v.
    """
    match block_kernel(q.device.type, q.dtype, q.shape[-1]):
        case "cpu flash":
            backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
            return Gradients(*backward(grad, q, k, v, whole.out, whole.lse, 0.0, causal))
        case "cuda flash":  # not run on hardware yet
            backward = aten._scaled_dot_product_flash_attention_backward
            unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
            lengths = (None, None, q.shape[2], k.shape[2])
            rest = (*lengths, 0.0, causal, unused, unused)
            return Gradients(*backward(grad, q, k, v, whole.out, whole.lse, *rest))
        case _:
            return written_out_gradients(grad, q, k, v, whole, causal)


def block_kernel(device: str, dtype: torch.dtype, width: int) -> str:
    """Which kernel attends to a block: ``cpu flash``, ``cuda flash`` or ``written out``."""
    if device == "cpu":
        return "cpu flash"
    if device == "cuda" and dtype in HALVES and width % 8 == 0 and width <= 256:
        return "cuda flash"
    return "written out"


def written_out(q: Queries, k: Keys, v: Keys, causal: bool) -> Part:
    """Attention to one block with plain matrix products, in fp32 for half-precision inputs."""
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype)
    return Part(out.to(q.dtype), lse)


def written_out_gradients(
    grad: Queries, q: Queries, k: Keys, v: Keys, whole: Part, causal: bool
) -> Gradients:
    """Gradients of ``written_out`` for a merged output and log-sum-exp."""
    weights = (_scores(q, k, causal) - whole.lse.unsqueeze(-1)).exp()
    wide = weights.dtype
    upper = grad.to(wide)
    drop = (upper * whole.out.to(wide)).sum(-1, keepdim=True)
    inner = weights * (upper @ v.to(wide).mT - drop) * q.shape[-1] ** -0.5
    dv = weights.mT @ upper
    dq, dk = inner @ k.to(wide), inner.mT @ q.to(wide)
    return Gradients(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


def _scores(q: Queries, k: Keys, causal: bool) -> Float[Tensor, "b h l k"]:
    """Scaled products; minus infinity where a query does not see a key."""
    wide = torch.float32 if q.dtype in HALVES else q.dtype
    scores = (q.to(wide) @ k.to(wide).mT) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf)
