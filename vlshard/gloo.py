"""FSDP2's collectives over CPU ranks, as point-to-point messages with the receives posted first.

gloo's own reduce-scatter sends as much as an all-reduce, and its all-gather posts sends first, so
that a rank which starts late makes both directions of a slow link take turns.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class _Messages:
    """What both collectives have in common."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of its own for each call."""
        return torch.empty(*size, dtype=dtype, device=device)


class GlooAllGather(_Messages):
    """Every rank sends its shard to each of the others."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` with the shards of all ranks, in group order; waits.

        Args:
          output_tensor: as many rows as all shards have.
          input_tensor: this rank's shard, which may lie in its place of the output already.
          group: the ranks.
          async_op: not used: the work is done when this returns.
        """
        me, parts = group.rank(), output_tensor.chunk(group.size())
        if parts[me].data_ptr() != input_tensor.data_ptr():
            parts[me].copy_(input_tensor)
        _swap([input_tensor] * len(parts), parts, group)


class GlooReduceScatter(_Messages):
    """Every rank sends each of the others its part, and adds up what it gets."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum this rank's part over all ranks, in group order; waits.

        Args:
          output_tensor: the sum.
          input_tensor: the parts of all ranks, in group order.
          group: the ranks.
          op: a plain sum.
          async_op: not used: the work is done when this returns.
        Raises: ValueError if the operation is not a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"gradients are summed, not reduced by {op}")
        me, parts = group.rank(), input_tensor.chunk(group.size())
        terms = [part if k == me else torch.empty_like(parts[me]) for k, part in enumerate(parts)]
        _swap(parts, terms, group)
        if len(terms) == 1:
            output_tensor.copy_(terms[0])
            return
        torch.add(terms[0], terms[1], out=output_tensor)
        for term in terms[2:]:
            output_tensor.add_(term)


def _swap(sent: Sequence[Tensor], landing: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send a tensor to each other rank and receive one from each."""
    messages = [
        dist.P2POp(op, x, group=group, group_peer=k)
        for op, tensors in ((dist.irecv, landing), (dist.isend, sent))
        for k, x in enumerate(tensors)
        if k != group.rank() and x.numel()
    ]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
