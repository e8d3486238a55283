"""Cross entropy over a large vocabulary, a chunk of rows at a time.

Dims: y labelled tokens, m model width, vocab.
"""

from collections.abc import Callable
from typing import Any

import einops
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK = 1024

# The loss term of some rows, as ``token_loss`` gives it: of normed states [y m], the output head
# [vocab m], the tokens to predict [y], and what to divide by.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def token_loss(
    hidden: Float[Tensor, "y m"],
    head_w: Float[Tensor, "vocab m"],
    targets: Int[Tensor, " y"],
    num_labels: Float[Tensor, ""],
    *,
    chunk: int = CHUNK,
) -> Float[Tensor, ""]:
    """Sum of the rows' cross entropies over the number of labels.

    Logits exist for ``chunk`` rows at most; backward computes them again, save the last chunk's.
    The head's gradient in half precision is summed over chunks in fp32 and rounded once.

    Args:
      hidden: normed states of the labelled tokens; none at all is fine.
      head_w: output head.
      targets: token id that each row should predict.
      num_labels: what to divide by.
      chunk: rows whose logits may exist at a time.
    Returns: loss term of these rows; fp32.
    """
    total: Tensor = _ChunkedCrossEntropy.apply(hidden, head_w, targets, chunk)
    return total / num_labels


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of ``hidden @ head_w.T``; saves a log-sum-exp per row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head_w: Tensor, targets: Tensor, chunk: int) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        logits = hidden.new_zeros((0, len(head_w)), dtype=torch.float32)
        norms: list[Tensor] = []
        for rows, wanted in _chunks(hidden, targets, chunk):
            logits = F.linear(rows, head_w).float()
            norms.append(logits.logsumexp(-1))
            picked = logits.gather(-1, einops.rearrange(wanted, "y -> y 1"))
            total = total + norms[-1].sum() - picked.sum()
        ctx.save_for_backward(hidden, head_w, targets, logits, *norms)
        ctx.chunk = chunk
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, head_w, targets, last, *norms = ctx.saved_tensors
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_rows: list[Tensor] = []
        grad_head: Tensor | None = None
        for i, (rows, wanted) in reversed([*enumerate(_chunks(hidden, targets, ctx.chunk))]):
            logits = last if i == len(norms) - 1 else F.linear(rows, head_w).float()
            grad_logits = _grad_logits(logits, norms[i], wanted, grad).to(head_w.dtype)
            if needs_hidden:
                grad_rows.insert(0, grad_logits @ head_w)
            if needs_head:
                columns = einops.rearrange(grad_logits, "y vocab -> vocab y")
                several = len(norms) > 1
                grad_head = _add_product(grad_head, columns, rows) if several else columns @ rows
        if needs_head:
            grad_head = (
                torch.zeros_like(head_w) if grad_head is None else grad_head.to(head_w.dtype)
            )
        whole = torch.cat(grad_rows or [torch.zeros_like(hidden)]) if needs_hidden else None
        return whole, grad_head, None, None


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """One more product of a sum of several; of half precision both are fp32."""
    if left.dtype.itemsize < 4 and left.device.type == "cuda":
        part = torch.mm(left, right, out_dtype=torch.float32)
        return part if total is None else total.add_(part)
    if left.dtype.itemsize < 4:
        left, right = left.float(), right.float()
    return left @ right if total is None else total.addmm_(left, right)


def _chunks(hidden: Tensor, targets: Tensor, chunk: int) -> list[tuple[Tensor, Tensor]]:
    """Runs of at most ``chunk`` rows and their targets; no run where there is no row."""
    pairs = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    return [pair for pair in pairs if len(pair[0])]


def _grad_logits(logits: Tensor, norms: Tensor, wanted: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the summed cross entropies by the logits: softmax, less 1 at the targets."""
    probs = (logits - einops.rearrange(norms, "y -> y 1")).exp_()
    index = einops.rearrange(wanted, "y -> y 1")
    return probs.scatter_add_(-1, index, -torch.ones_like(index, dtype=probs.dtype)).mul_(grad)
