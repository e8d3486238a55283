"""Mixture of experts as pure functions: router, grouped products over sorted rows, load balance.

Dims: n rows, t tokens (the rows that are no padding), k experts per token, e experts, m model
width, f expert width, r pairs of a row and an expert that are computed here (t * k if all are).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import einops
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from model.params import MoeParams
from vlshard import Boundaries
from vlshard.pytree import pytree

GROUPED_BYTES = 16


class Choice(NamedTuple):
    """The experts of each token, and in which order this rank computes its own: integers only.

    Attributes:
      experts: of each token.
      visits: who computes which tokens' experts, as ``at.visits`` gave it.
      row: of this rank's pairs of a row and an expert, sorted by expert, the row of each.
      ends: where the pairs of each expert of this rank end.
      place: where each pair is then, of the pairs sorted by row.
      begins: where the pairs of each row begin, of these.
    """

    experts: Int[Tensor, "t k"]
    visits: object
    row: Int[Tensor, " r"]
    ends: Int[Tensor, " here"]
    place: Int[Tensor, " r"]
    begins: Int[Tensor, " n"]


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


def route(
    router_w: Float[Tensor, "e m"], x: Float[Tensor, "n m"], real: Int[Tensor, " t"]
) -> Float[Tensor, "t e"]:
    """How probable each expert is for each token; softmax in fp32.

    Args:
      router_w: one row per expert.
      x: rows.
      real: which of them are tokens.
    Source: transformers 5.24, Qwen3VLMoeTextTopKRouter.
    """
    logits = F.linear(x, router_w).index_select(0, real)
    return F.softmax(logits, dim=-1, dtype=torch.float32)


def shares_of(probs: Float[Tensor, "t e"], experts: Int[Tensor, "t k"]) -> Float[Tensor, "t k"]:
    """The share of each chosen expert in its token's result; a token's sum to 1.

    Args:
      probs: of all experts.
      experts: the chosen ones.
    Source: transformers 5.24, Qwen3VLMoeTextTopKRouter.
    """
    chosen = probs.gather(-1, experts)
    return chosen / einops.reduce(chosen, "t k -> t 1", "sum")


class Kept:
    """What the first run of a block decided, so that a recompute decides alike, and asks nobody."""

    def __init__(self) -> None:
        """Nothing is decided yet."""
        self._choice: Choice | None = None

    def once(self, choose: Callable[[], Choice]) -> Choice:
        """What was chosen, now or in the first run."""
        self._choice = self._choice or choose()
        return self._choice


def choose(
    probs: Float[Tensor, "t e"],
    real: Int[Tensor, " t"],
    *,
    num_rows: int,
    num_here: int,
    top_k: int,
    at: Boundaries,
) -> Choice:
    """The most probable experts of each token, and what follows for the experts of this rank.

    Args:
      probs: of all experts; nothing flows back from a choice.
      real: which rows the tokens are, increasing.
      num_rows: how many rows there are.
      num_here: experts of this rank.
      top_k: experts per token.
      at: who has which expert.
    """
    experts = probs.detach().topk(top_k, dim=-1).indices
    visits = at.visits("text.experts", experts, real, num_rows)
    numbers, order = visits.expert.sort(stable=True)
    every = torch.arange(len(order), device=order.device)
    rows = torch.arange(visits.num_rows, device=order.device)
    return Choice(
        experts=experts,
        visits=visits,
        row=visits.row.index_select(0, order),
        ends=expert_ends(numbers, num_here),
        place=torch.empty_like(order).index_copy_(0, order, every),
        begins=torch.searchsorted(visits.row, rows),
    )


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
    out = F.grouped_mm(F.silu(gate) * up, einops.rearrange(down, "e m f -> e f m"), offs=ends)
    if out.requires_grad:
        out.register_hook(torch.Tensor.contiguous)  # the product's backward takes no expanded one
    return out


def weighted_sums(
    rows: Float[Tensor, "r m"],
    shares: Float[Tensor, " r"],
    place: Int[Tensor, " r"],
    begins: Int[Tensor, " n"],
) -> Float[Tensor, "n m"]:
    """For each row sum what its experts gave, each times its share, in fp32 and rounded once.

    Args:
      rows: what experts gave, sorted by expert.
      shares: of the pairs of a row and an expert, sorted by row.
      place: of these pairs among ``rows``.
      begins: where those of each row begin; a row without any gets zeros.
    Returns: one row per row; dtype of ``rows``.
    """
    weights = shares.to(rows.dtype)
    return F.embedding_bag(place, rows, begins, mode="sum", per_sample_weights=weights)


def moe(
    params: MoeParams,
    x: Float[Tensor, "n m"],
    real: Int[Tensor, " t"],
    *,
    top_k: int,
    at: Boundaries,
    kept: Kept | None = None,
) -> tuple[Float[Tensor, "n m"], Load]:
    """Send each token through its experts and add up what comes back.

    Args:
      params: the router, and the experts of this rank.
      x: rows.
      real: which of them are tokens, increasing; none at all is fine.
      top_k: experts per token.
      at: where tokens travel.
      kept: what an earlier run on the same tokens decided, or where this one keeps it.
    Returns: one row per row, zeros for padding, same dtype as x; and the load for the auxiliary
      loss.
    Source: transformers 5.24, Qwen3VLMoeTextSparseMoeBlock.
    """
    probs = route(params.router_w, x, real)
    sizes = {"num_rows": len(x), "num_here": len(params.down), "top_k": top_k}
    to = (kept or Kept()).once(lambda: choose(probs, real, **sizes, at=at))
    rows, shares = at.dispatch(to.visits, x, shares_of(probs, to.experts))
    rows = run_experts(params.down, params.gate_up, rows.index_select(0, to.row), to.ends)
    out = at.combine(to.visits, weighted_sums(rows, shares, to.place, to.begins))
    return out, _load(probs, to.experts)


def _load(probs: Float[Tensor, "t e"], experts: Int[Tensor, "t k"]) -> Load:
    """What one layer routed; gradients flow through the probabilities alone."""
    flat = einops.rearrange(experts, "t k -> (t k)")
    chosen = probs.new_zeros(probs.shape[1]).index_add_(0, flat, probs.new_ones(len(flat)))
    return Load(chosen, einops.reduce(probs, "t e -> e", "sum"), probs.new_tensor(len(probs)))


def load_balance(loads: Sequence[Load]) -> Float[Tensor, ""]:
    """Auxiliary loss: how far experts' shares of tokens and probabilities are from even.

    It is no sum over ranks: ``total_load`` adds the loads of all ranks up first.

    Args:
      loads: one load per layer that routes; all of the micro-batch's tokens.
    Returns: experts x sum over experts of (times chosen / tokens) x (probability / tokens); fp32.
    Source: transformers 5.24, load_balancing_loss_func with an attention mask.
    """
    chosen = torch.stack([load.chosen for load in loads]).sum(0)
    probs = torch.stack([load.probs for load in loads]).sum(0)
    tokens = torch.stack([load.tokens for load in loads]).sum()
    tokens = tokens.clamp(min=1)  # no token at all is even
    return len(chosen) * (chosen / tokens * (probs / tokens)).sum()


def total_load(loads: Sequence[Load], *, at: Boundaries) -> tuple[Load, Float[Tensor, ""]]:
    """The loads of all layers and ranks together; tokens that ranks have copies of count for each.

    Args:
      loads: of this rank, one per layer that routes.
      at: where totals are taken, once.
    Returns: one load, the same on all ranks, and how many ranks there are: a loss that is computed
      from it is divided by them, as each adds it to its term.
    """
    one = loads[0].tokens.new_ones(1)
    parts = [torch.cat([x.chosen, x.probs, einops.rearrange(x.tokens, "-> 1")]) for x in loads]
    total = at.total(torch.cat([torch.stack(parts).sum(0), one]))
    e = len(loads[0].chosen)
    chosen, probs, (tokens, ranks) = total.split([e, e, 2])
    return Load(chosen, probs, tokens), ranks
