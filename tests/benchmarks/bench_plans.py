"""Step time of every plan on two ranks, as a ratio to data parallel, in one run.

``make bench`` runs it. Plans take turns, round by round, on the same batches; a time is the
slowest rank's, a figure the median over rounds.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from model.config import Config
from tests.batches import Builder
from tests.dist.ranks import Ranks
from tests.tiny import tiny_raw
from tests.training import Run

PLANS = ("baseline_dp", "vision_dp1", "vision_cp_colossal", "vision_cp_ulysses")
TEXT = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "head_dim": 16,
    "moe_intermediate_size": 64,
}
VISION = {
    "depth": 6,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_heads": 4,
    "out_hidden_size": 128,
    "deepstack_visual_indexes": [1, 3, 5],
}


def measure(raw, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by plan; the same on every rank."""
    config = Config.from_dict(raw)
    data = {
        "even": Builder(config, 1).add(40, (24, 32), 60).add(40, (24, 32), 60).batch(),
        "ragged": Builder(config, 2).add(40, (40, 40), 60).add(40, (8, 8), 60).batch(),
    }
    runs = {plan: Run(config, f"plans/{plan}.py") for plan in PLANS}
    times: dict[str, list[float]] = {f"{plan} {name}": [] for name in data for plan in PLANS}
    for turn in range(rounds + 1):
        for name, batch in data.items():
            for plan, run in runs.items():
                run.model.zero_grad(set_to_none=True)
                dist.barrier()
                start = time.perf_counter()
                run.forward_backward(batch)
                seconds = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if turn:
                    times[f"{plan} {name}"].append(float(seconds))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    ranks = Ranks(2)
    raw = tiny_raw(text=TEXT, vision=VISION)
    times = ranks.run(measure, raw, parser.parse_args().rounds, timeout=600)[0]
    ranks.close()
    print(f"{'plan':20}{'batch':>8}{'median ms':>11}{'ratio':>7}   forward and backward, 2 ranks")
    for name in ("even", "ragged"):
        base = statistics.median(times[f"{PLANS[0]} {name}"])
        for plan in PLANS:
            median = statistics.median(times[f"{plan} {name}"])
            print(f"{plan:20}{name:>8}{median * 1e3:11.1f}{median / base:7.2f}")


if __name__ == "__main__":
    main()
