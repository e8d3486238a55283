"""The modes of the vision encoder on two ranks, side by side, at three shapes.

``make bench`` runs it. All modes live in the same two processes and take turns, round by round, on
the same batches; a step is timed on the slowest rank. Memory is measured in a run of each mode
alone. Ratios are to the first mode. With ``--losses N`` it trains each mode for N steps and prints
how far the losses part.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

from tests.benchmarks.contenders import UnderPlan, step
from tests.benchmarks.launch import inside_ranks, on_ranks
from tests.benchmarks.workloads import BATCH, WORKLOADS
from tests.plan_names import TIMED_PLANS

SHAPES = {"small": "W1", "vision": "vision", "ragged": "ragged"}
WARMUP, STEPS = 2, 10


def measure(workload: str, modes: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of every timed step, by mode; the same on every rank."""
    running = {name: UnderPlan(WORKLOADS[workload], TIMED_PLANS[name]) for name in modes}
    times: dict[str, list[float]] = {name: [] for name in modes}
    steps = STEPS if workload == "W1" else 1
    for turn in range(rounds + 1):
        for name, mode in running.items():
            prepared = [mode.prepare(number) for number in range(steps if turn else WARMUP)]
            for batch in prepared:
                dist.barrier()
                start = time.perf_counter()
                step(mode, batch)
                seconds = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if turn:
                    times[name].append(float(seconds))
    return times


def follow(workload: str, modes: list[str], steps: int) -> dict[str, list[float]]:
    """Losses of every step, by mode."""
    losses: dict[str, list[float]] = {}
    for name in modes:
        mode = UnderPlan(WORKLOADS[workload], TIMED_PLANS[name])
        losses[name] = [float(step(mode, mode.prepare(number))) for number in range(steps)]
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--modes", nargs="+", choices=TIMED_PLANS, default=list(TIMED_PLANS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--losses", type=int, default=0, help="compare losses over so many steps")
    chosen = parser.parse_args()
    if not inside_ranks():
        print(on_ranks("tests.benchmarks.seed_table", sys.argv[1:]), end="")
        for shape in chosen.shapes if not chosen.losses else ():
            show_memory(shape, chosen.modes)
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for shape in chosen.shapes:
        if chosen.losses:
            show_losses(shape, follow(SHAPES[shape], chosen.modes, chosen.losses))
        else:
            show_times(shape, measure(SHAPES[shape], chosen.modes, chosen.rounds))
    dist.destroy_process_group()


def show_times(shape: str, times: dict[str, list[float]]) -> None:
    """Print the table of one shape, on rank 0."""
    if dist.get_rank():
        return
    tokens = BATCH * WORKLOADS[SHAPES[shape]].length
    first = next(iter(times))
    base = statistics.median(times[first])
    print(f"\n{shape} shape, two ranks, one thread each, {len(times[first])} steps a mode")
    print(f"{'mode':18}{'mean ms':>9}{'median ms':>11}{'tokens/s':>10}{'ratio':>7}")
    for name, found in times.items():
        mean, median = statistics.mean(found), statistics.median(found)
        speed = f"{tokens / median:10.0f}{base / median:7.3f}"
        print(f"{name:18}{mean * 1e3:9.2f}{median * 1e3:11.2f}{speed}", flush=True)


def show_memory(shape: str, modes: list[str]) -> None:
    """Print the peak memory of a rank, each mode alone."""
    print(f"\n{shape} shape: largest resident memory of a rank")
    for name in modes:
        arguments = ["--workload", SHAPES[shape], "--contender", TIMED_PLANS[name]]
        arguments += ["--steps", "1", "--warmup", "1"]
        found = json.loads(on_ranks("tests.benchmarks.one_run", arguments))
        print(f"{name:18}{found['peak_mib']:9.1f} MiB", flush=True)


def show_losses(shape: str, losses: dict[str, list[float]]) -> None:
    """Print how far each mode's losses part from the first one's, on rank 0."""
    if dist.get_rank():
        return
    first, base = next(iter(losses.items()))
    print(f"\n{shape} shape, losses over {len(base)} steps, from {base[0]:.6f} to {base[-1]:.6f}")
    print(f"{'mode':18}{'first step':>12}{'largest':>12}{'mean':>12}   |difference to {first}|")
    for name, found in losses.items():
        off = [abs(a - b) for a, b in zip(found, base, strict=True)]
        print(f"{name:18}{off[0]:12.1e}{max(off):12.1e}{statistics.mean(off):12.1e}", flush=True)


if __name__ == "__main__":
    main()
