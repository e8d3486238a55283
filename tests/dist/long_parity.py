"""Long parity: every plan on 2 and 4 ranks follows one process for 100 steps.

``make parity`` runs it. It prints, per plan and number of ranks, the largest difference in loss
and the largest relative difference in gradient norm of any step, and fails above 1e-3.
"""

import argparse
import sys
import time

import torch

from model.config.config import Config
from tests.batches import batches
from tests.dist.ranks import Ranks
from tests.plan_names import FOUR_RANKS_ONLY, MAIN_PLANS, OTHER_PLANS
from tests.tiny import tiny_config
from tests.training import Run

PLANS = (*MAIN_PLANS, *OTHER_PLANS)
RUNS = (*((plan, False) for plan in PLANS), ("vision_cp_colossal", True))
SEED = 3
LIMIT = 1e-3
UNLABELLED = "no label at all"


def train(plan: str | None, packed: bool, raw, steps: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a run over all kinds of batches in turn."""
    run = Run(Config.from_dict(raw), plan, seed=SEED, packed=packed)
    data = [batch for name, batch in batches(run.config).items() if name != UNLABELLED]
    outcome = run.train(data, steps=steps, weight_decay=0.1)
    return outcome.losses, outcome.norms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=PLANS)
    parser.add_argument("--worlds", nargs="+", type=int, default=(2, 4))
    chosen = parser.parse_args()
    steps = chosen.steps
    torch.set_num_threads(1)
    raw = tiny_config().raw
    losses, norms = train(None, False, raw, steps)
    print(f"one process: {steps} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(
        f"{'plan':28}{'ranks':>6}{'max |loss difference|':>24}{'max norm difference':>22}{'s':>7}"
    )
    worst = 0.0
    for world in chosen.worlds:
        ranks = Ranks(world)
        for plan, packed in RUNS:
            if plan not in chosen.plans or (world == 2 and plan in FOUR_RANKS_ONLY):
                continue
            start = time.perf_counter()
            path = f"plans/{plan}.py"
            found = ranks.run(train, path, packed, raw, steps, timeout=600)[0]
            off = max(abs(a - b) for a, b in zip(found[0], losses, strict=True))
            norm_off = max(abs(a - b) / b for a, b in zip(found[1], norms, strict=True))
            seconds = time.perf_counter() - start
            name = f"{plan}{', packed' if packed else ''}"
            print(f"{name:28}{world:6}{off:24.2e}{norm_off:22.2e}{seconds:7.1f}", flush=True)
            worst = max(worst, off)
        ranks.close()
    print(f"largest difference in loss over {steps} steps: {worst:.2e} (limit {LIMIT:g})")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
