"""A few steps of one contender on ranks of its own: a JSON line with losses, times and memory."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.contenders import contender
from tests.benchmarks.workloads import WORKLOADS


def peak_mib() -> float:
    """Largest resident memory of this process since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> None:
    """Count the largest resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--contender", required=True, help="a plan, 'hf ddp' or 'hf fsdp'")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    running = contender(chosen.contender, WORKLOADS[chosen.workload])
    prepared = [running.prepare(step) for step in range(chosen.warmup + chosen.steps)]
    losses, times = [], []
    for number, batch in enumerate(prepared):
        if number == chosen.warmup:
            reset_peak()
        dist.barrier()
        start = time.perf_counter()
        losses.append(float(running.step(batch)))
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(float(seconds))
    peak = torch.tensor(peak_mib())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        result = {"losses": losses, "seconds": times[chosen.warmup :], "peak_mib": float(peak)}
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # DDP's reducer can wait for ever when it takes its gloo group down


if __name__ == "__main__":
    main()
