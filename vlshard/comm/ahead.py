"""Index tensors go to a device together and early, not each where it is first asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlshard.language import IntArray


@dataclass(frozen=True, eq=False)
class Index:
    """Rows that a tensor will be indexed by, and where their copies on devices are kept."""

    rows: IntArray
    copies: dict[torch.device, Tensor]

    def on(self, device: torch.device) -> Tensor:
        """The copy on a device, made now if ``send_ahead`` has not made it."""
        if device not in self.copies:
            rows = np.ascontiguousarray(self.rows, dtype=np.int64)
            self.copies[device] = torch.from_numpy(rows).to(device)
        return self.copies[device]


def send_ahead(indices: Sequence[Index], device: torch.device) -> None:
    """Send all indices to a device in one copy, from pinned memory and without waiting for it.

    On the CPU there is nothing to send. No device has run it yet.

    Args:
      indices: what will be asked for.
      device: where.
    """
    wanted = [index for index in indices if device not in index.copies and index.rows.size]
    if device.type == "cpu" or not wanted:
        return
    rows = np.concatenate([index.rows for index in wanted]).astype(np.int64)
    there = move_pinned(torch.from_numpy(rows), device)
    start = 0
    for index in wanted:
        index.copies[device] = there[start : start + index.rows.size]
        start += index.rows.size


def move_pinned(x: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, on its way when this returns."""
    pinned = x.pin_memory() if device.type in ("cuda", "npu") else x
    return pinned.to(device, non_blocking=True)
