"""Integers on the host that ranks send each other, to each what is meant for it."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from vlshard.language import IntArray


def exchange_arrays(
    outgoing: Sequence[IntArray], group: dist.ProcessGroup | None
) -> list[IntArray]:
    """Send each member of a group its array: one all-to-all of sizes, one of content.

    Args:
      outgoing: one array of integers a member, in the order of the group.
      group: a group with CPU tensors that nothing else uses at this time; None is this rank alone.
    Returns: what each member has sent here, in the order of the group.
    """
    if group is None:
        return [np.asarray(array, np.int64) for array in outgoing]
    sizes = torch.tensor([array.size for array in outgoing])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    sent = torch.from_numpy(np.concatenate(outgoing).astype(np.int64))
    counts = cast("list[int]", coming.tolist())
    came = torch.empty(sum(counts), dtype=torch.int64)
    dist.all_to_all_single(came, sent, counts, sizes.tolist(), group=group)
    return np.split(came.numpy(), np.cumsum(counts)[:-1])
