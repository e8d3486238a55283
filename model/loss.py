"""Cross entropy over a large vocabulary, a chunk of rows at a time.

Dims: z labelled tokens, m model width, vocab. Ranks may share the vocabulary: then each has some
columns, and all of them have the same rows.
"""

from collections.abc import Callable
from typing import Any

import einops
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vlshard import Boundaries

CHUNK = 1024

# The loss term of some rows, as ``token_loss`` gives it: of normed states [z m], the output head
# [vocab m], the tokens to predict [z], and what to divide by.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def token_loss(
    hidden: Float[Tensor, "z m"],
    head_w: Float[Tensor, "vocab m"],
    targets: Int[Tensor, " z"],
    num_labels: Float[Tensor, ""],
    *,
    at: Boundaries,
    chunk: int = CHUNK,
) -> Float[Tensor, ""]:
    """Sum of the rows' cross entropies over the number of labels.

    Logits exist for ``chunk`` rows at most; backward computes them again, save the last chunk's.
    The head's gradient in half precision is summed over chunks in fp32 and rounded once.

    Args:
      hidden: normed states of the labelled tokens; none at all is fine.
      head_w: output head, or this rank's part of it.
      targets: token id that each row should predict.
      num_labels: what to divide by.
      at: where results over parts of the vocabulary are merged.
      chunk: rows whose logits may exist at a time.
    Returns: loss term of these rows; fp32.
    """
    wanted = at.columns("text.vocab", targets)
    total: Tensor = _ChunkedCrossEntropy.apply(hidden, head_w, wanted, chunk, at)
    return at.leave("text.vocab", total) / num_labels


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of ``hidden @ head_w.T``; saves a log-sum-exp per row."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_w: Tensor, targets: Tensor, chunk: int, at: Boundaries
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        logits = hidden.new_zeros((0, len(head_w)), dtype=torch.float32)
        norms: list[Tensor] = []
        for rows, wanted in _chunks(hidden, targets, chunk):
            logits = F.linear(rows, head_w).float()
            norm, picked = at.merge("text.vocab", row_parts(logits, wanted)).unbind(-1)
            norms.append(norm)
            total = total + norm.sum() - picked.sum()
        ctx.save_for_backward(hidden, head_w, targets, *norms)
        ctx.chunk, ctx.last = chunk, logits
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_w, targets, *norms = ctx.saved_tensors
        last, ctx.last = ctx.last, None
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_rows: list[Tensor] = []
        grad_head: Tensor | None = None
        for i, (rows, wanted) in reversed([*enumerate(_chunks(hidden, targets, ctx.chunk))]):
            kept, last = last, None
            logits = F.linear(rows, head_w).float() if kept is None else kept
            grad_logits = _grad_logits(logits, norms[i], wanted, grad).to(head_w.dtype)
            if needs_hidden:
                grad_rows.insert(0, grad_logits @ head_w)
            if needs_head:
                columns = einops.rearrange(grad_logits, "z vocab -> vocab z")
                several = len(norms) > 1
                grad_head = _add_product(grad_head, columns, rows) if several else columns @ rows
        if needs_head:
            grad_head = (
                torch.zeros_like(head_w) if grad_head is None else grad_head.to(head_w.dtype)
            )
        whole = torch.cat(grad_rows or [torch.zeros_like(hidden)]) if needs_hidden else None
        return whole, grad_head, None, None, None


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


def row_parts(logits: Float[Tensor, "z vocab"], wanted: Int[Tensor, " z"]) -> Float[Tensor, "z 3"]:
    """What ``Boundaries.merge`` takes of some columns of logits.

    Args:
      logits: fp32.
      wanted: the column of each row's target; negative where it is not among these.
    Returns: the largest logit, the sum of the powers of e of all less that, the target's logit.
    """
    if not logits.shape[-1]:
        return logits.new_tensor([-torch.inf, 0.0, 0.0]).expand(len(logits), 3)
    largest = logits.amax(-1)
    total = (logits - einops.rearrange(largest, "z -> z 1")).exp_().sum(-1)
    index, here = _targets(wanted)
    target = einops.rearrange(logits.gather(-1, index), "z 1 -> z")
    return torch.stack([largest, total, target.where(here, 0.0)], -1)


def _grad_logits(logits: Tensor, norms: Tensor, wanted: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the summed cross entropies by the logits: softmax, less 1 at the targets.

    It takes the place of the logits, which nobody else needs.
    """
    probs = logits.sub_(einops.rearrange(norms, "z -> z 1")).exp_()
    index, here = _targets(wanted)
    if probs.shape[-1]:
        probs.scatter_add_(-1, index, -einops.rearrange(here, "z -> z 1").to(probs.dtype))
    return probs.mul_(grad)


def _targets(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """A column for each row, [z 1], and whether it is the row's target."""
    return einops.rearrange(wanted.clamp(min=0), "z -> z 1"), wanted >= 0
