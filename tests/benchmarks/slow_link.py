"""Two ranks that are joined by a link of a given rate, on one machine.

Each rank has a network namespace and a core of its own, as if it were a host; a veth pair joins
them and a token bucket limits either direction. Needs root, ``ip`` and ``tc`` (iproute2).
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

SUBNET = "10.201.0"
PORT = "29511"
BUCKET_SECONDS = 1e-3
LARGEST_PACKET = 64 * 1024
POLL_SECONDS = 0.1


class LinkError(RuntimeError):
    """The link cannot be made here, or a rank on it failed."""


def run_on_link(module: str, arguments: Sequence[str], rate: int, *, seconds: int = 600) -> str:
    """Run a module as two ranks over a link.

    Args:
      module: such as ``tests.benchmarks.bench_overlap``; it starts its process group itself.
      arguments: of its command line.
      rate: of the link, each way [bit/s]; 0 leaves it unlimited.
      seconds: time limit.
    Returns: what rank 0 printed.
    Raises: LinkError if the link cannot be made, a rank fails, or time is up.
    """
    with _link(rate) as spaces:
        ranks = [_start(space, rank, module, arguments) for rank, space in enumerate(spaces)]
        try:
            _wait(ranks, time.monotonic() + seconds)
            output = ranks[0].stdout
            return "" if output is None else output.read()
        finally:
            for process in ranks:
                process.kill()


def _start(space: str, rank: int, module: str, arguments: Sequence[str]) -> "subprocess.Popen[str]":
    """Start one rank in its namespace, on its core."""
    places = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": f"{SUBNET}.1",
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": f"link{rank}",
        "OMP_NUM_THREADS": "1",
    }
    cores = sorted(os.sched_getaffinity(0))
    core = str(cores[rank % len(cores)])
    command = ["ip", "netns", "exec", space, "taskset", "-c", core, sys.executable, "-m", module]
    out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
    environment = {**os.environ, **places}
    return subprocess.Popen([*command, *arguments], env=environment, stdout=out, text=True)


def _wait(ranks: list["subprocess.Popen[str]"], deadline: float) -> None:
    """Wait for both; a rank that fails ends the run."""
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
        if failed:
            raise LinkError(f"rank {failed[0]} exited with {ranks[failed[0]].returncode}")
        if time.monotonic() > deadline:
            raise LinkError("the ranks took too long")
        time.sleep(POLL_SECONDS)
    if any(process.returncode for process in ranks):
        raise LinkError(f"the ranks exited with {[process.returncode for process in ranks]}")


@contextmanager
def _link(rate: int) -> Generator[tuple[str, str]]:
    """Two namespaces joined by a veth pair, removed afterwards."""
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing or os.geteuid():
        raise LinkError(f"needs root{''.join(f' and {tool}' for tool in missing)}")
    first, second = spaces = tuple(f"vlshard{os.getpid()}-{rank}" for rank in range(2))
    try:
        for space in spaces:
            _do("ip", "netns", "add", space)
        _do(
            "ip",
            "-n",
            first,
            "link",
            "add",
            "link0",
            "type",
            "veth",
            "peer",
            "link1",
            "netns",
            second,
        )
        for rank, space in enumerate(spaces):
            _bring_up(space, rank, rate)
        yield first, second
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _bring_up(space: str, rank: int, rate: int) -> None:
    """Give one end an address and a rate; bursts hold a millisecond, and one packet at least."""
    packet = int(min(max(rate / 8 * BUCKET_SECONDS, 16 * 1024), LARGEST_PACKET))
    _do("ip", "-n", space, "link", "set", "lo", "up")
    _do("ip", "-n", space, "addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", f"link{rank}")
    _do("ip", "-n", space, "link", "set", f"link{rank}", "gso_max_size", str(packet), "up")
    if rate:
        burst = str(packet + packet // 16 + 1000)
        shape = ["rate", f"{rate}bit", "burst", burst, "limit", "16mb"]
        _do("tc", "-n", space, "qdisc", "add", "dev", f"link{rank}", "root", "tbf", *shape)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"{' '.join(command)}: {done.stderr.strip()}")
