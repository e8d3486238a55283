"""Starts a benchmark module on ranks of its own, one thread each, without the shape hook."""

import os
import subprocess
import sys
from collections.abc import Sequence

# Unless told not to, glibc gives freed memory back to the system and takes it anew each step.
TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "99999999999",
    "MALLOC_TOP_PAD_": "268435456",
}

SECONDS = 3600  # the longest benchmark takes half of it


def on_ranks(module: str, arguments: Sequence[str], world: int = 2, *, tuned: bool = False) -> str:
    """Run a module under torchrun.

    Args:
      module: such as ``tests.benchmarks.one_run``.
      arguments: of its command line.
      world: number of ranks.
      tuned: set glibc's allocator to keep what is freed.
    Returns: what it printed.
    Raises: CalledProcessError if it failed, with its errors shown; TimeoutExpired if it hangs.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", "-m", module, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(TUNED if tuned else {})}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS
    )
    return done.stdout


def inside_ranks() -> bool:
    """Whether this process is one of the ranks."""
    return "RANK" in os.environ
