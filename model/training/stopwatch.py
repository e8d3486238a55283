"""Seconds and memory of a step, measured where it is computed."""

import resource
import sys
import time
from collections import defaultdict

import torch

MIB = 2**20


class Stopwatch:
    """Seconds that parts of a step take, on the device where they run.

    Accelerators work behind the program, so marks are set there and read at the end, which waits
    for the device once a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, float | torch.Event]] = []
        self.lap("")

    def lap(self, part: str) -> None:
        """What has run since the lap before belongs to a part; parts may come several times."""
        if self._device.type == "cpu":
            self._marks.append((part, time.perf_counter()))
            return
        mark = torch.Event(self._device, enable_timing=True)
        mark.record()
        self._marks.append((part, mark))

    def seconds(self) -> dict[str, float]:
        """Seconds of each part."""
        found: dict[str, float] = defaultdict(float)
        for (_, before), (part, mark) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(mark, torch.Event) and isinstance(before, torch.Event):
                mark.synchronize()
                found[part] += before.elapsed_time(mark) / 1000
            elif isinstance(mark, float) and isinstance(before, float):
                found[part] += mark - before
        return dict(found)


def peak_memory(device: torch.device) -> int:
    """The most memory so far: of the device's allocator, or of this process on the CPU [MiB]."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) // MIB
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size // (MIB if sys.platform == "darwin" else 1024)
