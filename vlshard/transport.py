"""The one place that hands activations to ``torch.distributed``.

Sizes are known on the host before anything is launched. On the CPU an all-to-all is made of
point-to-point messages with the receives posted first (a rank that starts late then does not
make the two directions of a link take turns), and messages of no elements are left out on both
sides. On a device it is one ``all_to_all_single``, which every rank of the group enters even if
it has nothing to send.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work


class Flight:
    """Tensors on their way; what is sent stays alive until ``wait`` returns."""

    def __init__(self, parts: Sequence[Tensor], works: Sequence[Work], sent: Sequence[Tensor]):
        self._parts = list(parts)
        self._works = list(works)
        self._sent = list(sent)

    def wait(self) -> list[Tensor]:
        """Wait until everything has arrived.

        Returns: one tensor per member of the group (of an all-reduce, the sum alone).
        Raises: RuntimeError if a peer is gone.
        """
        for work in self._works:
            work.wait()
        self._works.clear()
        self._sent.clear()
        return self._parts


def launch(
    outgoing: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: ProcessGroup
) -> Flight:
    """Send one tensor to each member of a group and receive one from each.

    Args:
      outgoing: for each member of the group in order, what it gets; this rank's own entry is
        handed through as it is.
      shapes: shape of what comes from each member; dtype and device are those of ``outgoing``.
      group: the ranks that take part; all of them call this.
    Returns: the tensors in flight, one per member.
    """
    on_cpu = outgoing[group.rank()].device.type == "cpu"
    return (launch_messages if on_cpu else launch_single)(outgoing, shapes, group)


def launch_single(
    outgoing: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: ProcessGroup
) -> Flight:
    """The all-to-all as one collective, for devices; arguments as of ``launch``."""
    me = group.rank()
    sent = [x.new_empty(0) if k == me else x.reshape(-1) for k, x in enumerate(outgoing)]
    sizes = [0 if k == me else math.prod(shape) for k, shape in enumerate(shapes)]
    flat, sent_sizes = torch.cat(sent), [x.numel() for x in sent]
    landing = flat.new_empty(sum(sizes))
    work = cast(
        "Work | None",
        dist.all_to_all_single(landing, flat, sizes, sent_sizes, group=group, async_op=True),
    )
    pieces = cast("tuple[Tensor, ...]", landing.split(sizes))
    parts = [
        outgoing[me] if k == me else piece.view(shape)
        for k, (piece, shape) in enumerate(zip(pieces, shapes, strict=True))
    ]
    return Flight(parts, [] if work is None else [work], [flat])


def launch_messages(
    outgoing: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: ProcessGroup
) -> Flight:
    """The all-to-all as point-to-point messages, receives first; arguments as of ``launch``."""
    me = group.rank()
    own = outgoing[me]
    parts = [own if k == me else own.new_empty(shape) for k, shape in enumerate(shapes)]
    sent = [x.contiguous() for x in outgoing]
    messages = [
        dist.P2POp(op, x, group=group, group_peer=k)
        for op, tensors in ((dist.irecv, parts), (dist.isend, sent))
        for k, x in enumerate(tensors)
        if k != me and x.numel()
    ]
    return Flight(parts, dist.batch_isend_irecv(messages) if messages else [], sent)


def launch_sum(x: Tensor, group: ProcessGroup) -> Flight:
    """All-reduce a tensor.

    Args:
      x: this rank's term, left as it is.
      group: the ranks that take part.
    Returns: the sum in flight, as the only part.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    work = cast("Work | None", dist.all_reduce(total, group=group, async_op=True))
    return Flight([total], [] if work is None else [work], [])
