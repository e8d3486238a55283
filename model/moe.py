"""Mixture of experts as pure functions: router, grouped products over sorted rows, load balance.

Dims: t tokens (no padding among them), k experts per token, e experts, m model width, f expert
width, r = t * k routed rows.
"""

from collections.abc import Sequence

import einops
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from model.params import MoeParams
from vlshard.pytree import pytree

GROUPED_BYTES = 16


@pytree
class Routing:
    """Where tokens go: probabilities of all experts, the chosen ones and their shares.

    ``probs`` are fp32; ``shares`` sum to 1 over a token's experts.
    """

    probs: Float[Tensor, "t e"]
    experts: Int[Tensor, "t k"]
    shares: Float[Tensor, "t k"]


@pytree
class Load:
    """Sums over the tokens that one layer routed: what the load balance is made of; fp32."""

    chosen: Float[Tensor, " e"]
    probs: Float[Tensor, " e"]
    tokens: Float[Tensor, ""]


def refuse_widths(widths: dict[str, int], dtype: torch.dtype) -> None:
    """Refuse expert widths whose rows the grouped matrix product cannot step over.

    Args:
      widths: widths by the name of their setting [features].
      dtype: what the experts are computed in.
    Raises: ValueError naming each width that is no multiple of 16 bytes.
    """
    unit = GROUPED_BYTES // dtype.itemsize
    wrong = [f"{name}={width}" for name, width in widths.items() if width % unit]
    if wrong:
        raise ValueError(
            f"the grouped matrix product needs widths that are multiples of {unit} in {dtype}, "
            f"got {', '.join(wrong)}"
        )


def route(router_w: Float[Tensor, "e m"], x: Float[Tensor, "t m"], *, top_k: int) -> Routing:
    """Choose experts and their shares for each token.

    Args:
      router_w: one row per expert.
      x: tokens.
      top_k: experts per token.
    Returns: softmax over all experts in fp32, the ``top_k`` largest, renormalised, in x's dtype.
    Source: transformers 5.24, Qwen3VLMoeTextTopKRouter.
    """
    probs = F.softmax(F.linear(x, router_w), dim=-1, dtype=torch.float32)
    largest, experts = probs.topk(top_k, dim=-1)
    shares = largest / einops.reduce(largest, "t k -> t 1", "sum")
    return Routing(probs, experts, shares.to(x.dtype))


def expert_ends(experts: Int[Tensor, " r"], num_experts: int) -> Int[Tensor, " e"]:
    """End of each expert's run in sorted ``experts``; int32, on the device."""
    numbers = torch.arange(num_experts, device=experts.device)
    return torch.searchsorted(experts, numbers, right=True, out_int32=True)


def run_experts(
    down: Float[Tensor, "e m f"],
    gate_up: Float[Tensor, "e 2*f m"],
    rows: Float[Tensor, "r m"],
    ends: Int[Tensor, " e"],
) -> Float[Tensor, "r m"]:
    """Apply each expert's gated MLP to its run of rows.

    Args:
      down: back to model width.
      gate_up: rows ``:f`` of each expert are the gate, the others are up.
      rows: tokens sorted by expert.
      ends: end of each expert's run; int32.
    Returns: one row per row, same order and dtype.
    """
    inner = F.grouped_mm(rows, einops.rearrange(gate_up, "e f m -> e m f"), offs=ends)
    gate, up = inner.chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, einops.rearrange(down, "e m f -> e f m"), offs=ends)


def moe(
    params: MoeParams, x: Float[Tensor, "t m"], *, top_k: int
) -> tuple[Float[Tensor, "t m"], Load]:
    """Send each token through its experts and add up what comes back.

    Args:
      params: router and experts.
      x: tokens without padding; none at all is fine.
      top_k: experts per token.
    Returns: one row per token, same dtype as x, and the load for the auxiliary loss.
    Source: transformers 5.24, Qwen3VLMoeTextSparseMoeBlock.
    """
    routing = route(params.router_w, x, top_k=top_k)
    experts, order = einops.rearrange(routing.experts, "t k -> (t k)").sort(stable=True)
    ends = expert_ends(experts, len(params.router_w))
    rows = run_experts(params.down, params.gate_up, x.index_select(0, order // top_k), ends)
    back = rows.index_select(0, order.argsort())
    each = einops.rearrange(back, "(t k) m -> t k m", k=top_k)
    shares = einops.rearrange(routing.shares, "t k -> t k 1")
    return einops.reduce(each * shares, "t k m -> t m", "sum"), _load(routing.probs, ends)


def _load(probs: Float[Tensor, "t e"], ends: Int[Tensor, " e"]) -> Load:
    """What one layer routed; gradients flow through the probabilities alone."""
    chosen = torch.diff(ends, prepend=torch.zeros_like(ends[:1])).to(probs.dtype)
    return Load(chosen, einops.reduce(probs, "t e -> e", "sum"), probs.new_tensor(len(probs)))


def load_balance(loads: Sequence[Load]) -> Float[Tensor, ""]:
    """Auxiliary loss: how far experts' shares of tokens and probabilities are from even.

    It is no sum over ranks: the loads of all ranks would have to be added up first.

    Args:
      loads: one load per layer that routes; all of the batch's tokens.
    Returns: experts x sum over experts of (times chosen / tokens) x (probability / tokens); fp32.
    Source: transformers 5.24, load_balancing_loss_func with an attention mask.
    """
    chosen = torch.stack([load.chosen for load in loads]).sum(0)
    probs = torch.stack([load.probs for load in loads]).sum(0)
    tokens = torch.stack([load.tokens for load in loads]).sum()
    return len(chosen) * (chosen / tokens * (probs / tokens)).sum()
