"""FSDP2's collectives over CPU ranks, as point-to-point messages with the receives posted first.

gloo's own reduce-scatter sends as much as an all-reduce, and its all-gather posts sends first, so
that a rank which starts late makes both directions of a slow link take turns.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

LARGE = 1 << 20  # bytes; the allocator keeps smaller blocks itself
MOST = 4  # two gathers and two reductions may be under way at once


class Buffers:
    """Large buffers that are handed out again when nobody holds them any more.

    The allocator gives large blocks back to the system. To map and clear them anew for each
    collective takes longer than the collective.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that nobody else holds or has a view of; not filled."""
        count = math.prod(size)
        for buffer in self._kept:
            if buffer.numel() == count and buffer.dtype == dtype and not held(buffer):
                return buffer.view(*size)
        with torch.inference_mode(False):  # else no training step could write to it later
            buffer = torch.empty(count, dtype=dtype, device=device)
        if buffer.nbytes >= LARGE:
            self._kept = sorted([buffer, *self._kept], key=lambda x: -x.nbytes)[:MOST]
        return buffer.view(*size)


def held(buffer: Tensor) -> bool:
    """Whether there are other tensors with the storage of this one.

    torch has no public way to ask; CUDA graphs ask in this way too.
    """
    storage = buffer.untyped_storage()  # counts as one holder, and the tensor as the other
    address = storage._cdata  # pyright: ignore[reportPrivateUsage]
    count = torch._C._storage_Use_Count  # pyright: ignore[reportPrivateUsage]
    return count(address) > 2


class GlooAllGather:
    """Every rank sends its shard to each of the others.

    Args:
      buffers: where what is gathered lies until it is copied out.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for the shards of all ranks."""
        return self._buffers.take(size, dtype, device)

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


class GlooReduceScatter:
    """Every rank sends each of the others its part, and adds up what it gets.

    Args:
      buffers: where the parts lie until they are summed.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._gradients_next = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """In turn a buffer for the parts, and memory of its own for the sum: the gradients."""
        self._gradients_next, gradients = not self._gradients_next, self._gradients_next
        if gradients:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._buffers.take(size, dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum this rank's part over all ranks, always in the same order; waits.

        Args:
          output_tensor: the sum; the first term that comes lands in it.
          input_tensor: the parts of all ranks, in group order.
          group: the ranks.
          op: a plain sum.
          async_op: not used: the work is done when this returns.
        Raises: ValueError if the operation is not a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"gradients are summed, not reduced by {op}")
        me, parts = group.rank(), input_tensor.chunk(group.size())
        if len(parts) == 1:
            output_tensor.copy_(parts[0])
            return
        first = 1 if me == 0 else 0
        landing = {me: parts[me], first: output_tensor}
        terms = [
            landing[k] if k in landing else torch.empty_like(parts[me]) for k in range(len(parts))
        ]
        _swap(parts, terms, group)
        for k, term in enumerate(terms):
            if k != first:
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
