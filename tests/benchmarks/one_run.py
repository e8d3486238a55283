"""A few steps of one contender on ranks of its own: a JSON line.

It has losses, the fingerprint of the first step's gradients, seconds, the peak of resident memory
and, of a step of rank 0, the memory mapped anew and the seconds that the system took. With
``--profile`` also what part of two more steps' time goes into what, as the profiler sees it.
"""

import argparse
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.contenders import Transformers, UnderPlan, contender, step
from tests.benchmarks.weights import fingerprint
from tests.benchmarks.workloads import WORKLOADS


def peak_mib() -> float:
    """Largest resident memory of this process since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> None:
    """Count the largest resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "moves of tokens, waiting included": ("_Travel", "_c10d_functional::"),
    "storage, waiting included": ("FSDP::", "fsdp::", "c10d::"),
}


def where_time_goes(running: UnderPlan | Transformers, batches: Sequence[Any]) -> dict[str, float]:
    """What part of its own time rank 0 spends in what, from the profiler's names."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for batch in batches:
            step(running, batch)
    times: Counter[str] = Counter()
    for event in seen.key_averages():
        if not event.key.startswith("gloo:"):  # its threads beside this one
            names = (k for k, begins in KINDS.items() if event.key.startswith(begins))
            times[next(names, "the rest")] += event.self_cpu_time_total
    return {kind: round(time / times.total(), 3) for kind, time in times.most_common()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--contender", required=True, help="a plan, or a mode of transformers")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    running = contender(chosen.contender, WORKLOADS[chosen.workload])
    prepared = [running.prepare(number) for number in range(chosen.warmup + chosen.steps)]
    running.compute(prepared[0])
    gradients = fingerprint(running.gradients())
    losses, times, before = [], [], resource.getrusage(resource.RUSAGE_SELF)
    for number, batch in enumerate(prepared):
        if number == chosen.warmup:
            reset_peak()
            before = resource.getrusage(resource.RUSAGE_SELF)
        dist.barrier()
        start = time.perf_counter()
        losses.append(float(step(running, batch)))
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(float(seconds))
    after = resource.getrusage(resource.RUSAGE_SELF)
    peak = torch.tensor(peak_mib())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    shares = where_time_goes(running, prepared[-2:]) if chosen.profile else {}
    if dist.get_rank() == 0:
        mapped = (after.ru_minflt - before.ru_minflt) * resource.getpagesize() / 2**20
        result = {
            "losses": losses,
            "gradients": gradients,
            "seconds": times[chosen.warmup :],
            "peak_mib": float(peak),
            "mapped_mib": mapped / chosen.steps,
            "system_seconds": (after.ru_stime - before.ru_stime) / chosen.steps,
            "shares": shares,
        }
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # DDP's reducer can wait for ever when it takes its gloo group down


if __name__ == "__main__":
    main()
