"""Step time and memory beside transformers' model, on the same work in one run.

``make bench`` runs it. Contenders take turns, round by round, each in processes of its own; a
figure is the median over all steps of all rounds, of the slowest rank. First losses and gradients
show that the work is the same: they are checked to agree, each whole gradient by its norm and its
product with a drawn direction. A perfect split takes half the time of one process. Mapped is what
rank 0 takes anew from the system in a step, which clears each page of it.
"""

import argparse
import json
import statistics

from tests.benchmarks.launch import on_ranks
from tests.plan_names import COMPARED_PLANS

ALONE = "single"
CONTENDERS = (ALONE, "hf ddp", "hf fsdp", *COMPARED_PLANS)
ALLOCATORS = ("default", "kept")
AGREE = 2e-5  # fp32 sums of thousands of terms in another order
GRADIENTS = 1e-4  # of a gradient's norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2"])
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, default=ALLOCATORS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    for tuned in (allocator == "kept" for allocator in chosen.allocators):
        for workload in chosen.workloads:
            runs = {name: [] for name in chosen.contenders}
            for _ in range(chosen.rounds):
                for name, found in runs.items():
                    found.append(one(workload, name, chosen.steps, tuned))
            show(workload, tuned, runs)


def one(workload: str, name: str, steps: int, tuned: bool) -> dict:
    """Run one contender once."""
    arguments = ["--workload", workload, "--contender", name, "--steps", str(steps)]
    world = 1 if name == ALONE else 2
    return json.loads(on_ranks("tests.benchmarks.one_run", arguments, world, tuned=tuned))


def show(workload: str, tuned: bool, runs: dict[str, list[dict]]) -> None:
    """Print the table of a workload; the work of all contenders must be the same."""
    firsts = {name: found[0]["losses"][0] for name, found in runs.items()}
    low, high = min(firsts.values()), max(firsts.values())
    assert high - low <= AGREE * high, firsts
    furthest = distance([found[0]["gradients"] for found in runs.values()])
    assert furthest <= GRADIENTS, furthest
    medians = {
        name: statistics.median(t for run in found for t in run["seconds"])
        for name, found in runs.items()
    }
    allocator = "memory kept" if tuned else "default allocator"
    print(f"\n{workload}, two ranks, one thread each, {allocator}; first loss {low:.6f},")
    print(f"gradients of all agree to {furthest:.0e} of each one's norm")
    columns = (f"{'to hf fsdp':>12}", f"{'to baseline':>13}", f"{'to perfect':>12}")
    print(f"{'':22}{'ms/step':>10}{''.join(columns)}{'peak MiB':>10}{'mapped MiB':>12}")
    perfect = medians[ALONE] / 2 if ALONE in medians else None
    for name, median in medians.items():
        peak = max(run["peak_mib"] for run in runs[name])
        mapped = statistics.median(run["mapped_mib"] for run in runs[name])
        bases = (medians.get("hf fsdp"), medians.get("baseline_dp"), perfect)
        ratios = ("-" if base is None else f"{base / median:.2f}" for base in bases)
        cells = "".join(
            f"{ratio:>{width}}" for ratio, width in zip(ratios, map(len, columns), strict=True)
        )
        print(f"{name:22}{median * 1e3:10.1f}{cells}{peak:10.0f}{mapped:12.0f}", flush=True)


def distance(fingerprints: list[dict[str, list[float]]]) -> float:
    """How far gradients are from the first contender's, at most, by its norm."""
    first, *others = fingerprints
    furthest = 0.0
    for other in others:
        assert other.keys() == first.keys(), other.keys() ^ first.keys()
        for name, (norm, product) in first.items():
            off = max(abs(other[name][0] - norm), abs(other[name][1] - product))
            furthest = max(furthest, off / norm if norm else off)
    return furthest


if __name__ == "__main__":
    main()
