"""What overlapping hides in vision attention, over links of given rates.

``python -m tests.benchmarks.bench_overlap`` runs two ranks in network namespaces (it needs root,
``ip`` and ``tc``), at 1 Gbit/s, at 200 Mbit/s and without a limit. Per mode and rate it times, in
turns, one attention layer forward and backward: synchronous, overlapped, its messages alone and its
projections alone. The patches are as wide as makes messages and projections take about as long.

What can overlap forward: keys with the projections of values and queries, values with that of
queries. The queries' all-to-all and the result's way back cannot: nothing is left to compute.
Backward likewise. ``hidden`` is (sync - async) / min(messages, projections), over those that can;
``ratio`` is the median over rounds of async to sync.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from model.config.config import Config
from model.params import AttentionParams, LinearParams
from model.rope import Rope, rotate, vision_rope
from model.vision import heads, vision_attention
from tests.benchmarks.launch import inside_ranks
from tests.benchmarks.slow_link import LinkError, run_on_link
from tests.tiny import tiny_raw
from vlshard import Mesh, Plan, gather, replicate, ulysses
from vlshard.plan.header import SampleFacts, make_headers
from vlshard.plan.step_boundaries import StepBoundaries

RATES = {"1 Gbit/s": 1_000_000_000, "200 Mbit/s": 200_000_000, "no limit": 0}
# Patches and their width: a wider patch has more to multiply for each byte that travels.
SHAPES = {1_000_000_000: (2048, 768), 200_000_000: (512, 3072), 0: (2048, 768)}
SIDE = 32
MODES = {"gather": gather, "ulysses": ulysses}


class Layer:
    """One attention layer on this rank's patches of one image."""

    def __init__(self, patches: int, width: int) -> None:
        vision = {"hidden_size": width, "num_heads": 8}
        self.config = Config.from_dict(tiny_raw(vision=vision)).vision
        self.whole = Config.from_dict(tiny_raw(vision=vision))
        grid = (1, SIDE, patches // SIDE)
        self._facts = SampleFacts(0, patches // 4 + 2, 1, (grid,), (1,))
        rows, width_of_head = patches // 2, self.config.head_dim
        torch.manual_seed(dist.get_rank())
        self.x = torch.randn(rows, width, requires_grad=True)
        coords = torch.zeros(rows, 2, dtype=torch.int64)
        self.rope: Rope = vision_rope(coords, width=width_of_head, theta=10000.0)
        linear = [self._linear(width) for _ in range(4)]
        self.params = AttentionParams(*linear)

    def _linear(self, width: int) -> LinearParams:
        weight = torch.randn(width, width) * width**-0.5
        return LinearParams(weight.requires_grad_(), torch.zeros(width, requires_grad=True))

    def at(self, mode, overlap: bool) -> StepBoundaries:
        """Boundaries under a mode."""
        plan = Plan(
            mesh=Mesh(dp=1, cp=2),
            params={"**": replicate()},
            layouts={"vision.patches": "(img@dp.home s)@cp c", "text.tokens": "b@dp.home s m"},
            attention={"vision": mode("cp", overlap=overlap)},
        )
        return plan.bind(self.whole, 2).step(make_headers([self._facts], 1)[0])

    def step(self, at: StepBoundaries) -> None:
        """The whole layer."""
        width = self.config.head_dim
        out = vision_attention(self.params, self.x, self.rope, width=width, at=at)
        out.square().sum().backward()

    def messages(self, at: StepBoundaries) -> None:
        """Keys and values alone, there and their gradients back."""
        shape = (len(self.x), self.config.num_heads, self.config.head_dim)
        k, v = (torch.ones(shape, requires_grad=True) for _ in range(2))
        moved = [at.start(f"vision.{name}", x).wait() for name, x in (("k", k), ("v", v))]
        torch.autograd.backward(moved, [torch.ones_like(x) for x in moved])

    def projections(self, at: StepBoundaries) -> None:
        """Values and queries alone: what keys and values can hide behind."""
        v = heads(self.x, self.params.v, self.config.head_dim)
        q = rotate(heads(self.x, self.params.q, self.config.head_dim), self.rope)
        torch.autograd.backward([v, q], [torch.ones_like(v), torch.ones_like(q)])


def timed(run: Callable[[], None]) -> float:
    """Seconds of the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measure(rate: int, rounds: int) -> None:
    """Print one line a mode, on rank 0."""
    layer = Layer(*SHAPES[rate])
    for name, mode in MODES.items():
        sync, flying = layer.at(mode, overlap=False), layer.at(mode, overlap=True)
        runs = {
            "sync": lambda at=sync: layer.step(at),
            "async": lambda at=flying: layer.step(at),
            "messages": lambda at=sync: layer.messages(at),
            "projections": lambda at=sync: layer.projections(at),
        }
        times: dict[str, list[float]] = {key: [] for key in runs}
        for turn in range(rounds + 2):
            for key, run in runs.items():
                seconds = timed(run)
                if turn >= 2:
                    times[key].append(seconds)
        medians = {key: statistics.median(found) for key, found in times.items()}
        gained = medians["sync"] - medians["async"]
        hidden = gained / min(medians["messages"], medians["projections"])
        if dist.get_rank() == 0:
            cells = "".join(f"{medians[key] * 1e3:12.1f}" for key in runs)
            pairs = zip(times["async"], times["sync"], strict=True)
            ratio = statistics.median(flown / waited for flown, waited in pairs)
            print(f"{name:10}{cells}{ratio:8.3f}{hidden:9.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rate", type=int, default=0, help="of the link, told to the ranks")
    chosen = parser.parse_args()
    if inside_ranks():
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        measure(chosen.rate, chosen.rounds)
        dist.destroy_process_group()
        return
    head = "".join(f"{key + ' ms':>12}" for key in ("sync", "async", "messages", "project."))
    for name, rate in RATES.items():
        patches, width = SHAPES[rate]
        print(f"\nlink: {name}; {patches} patches of width {width}, two ranks, one core each, fp32")
        print(f"{'mode':10}{head}{'ratio':>8}{'hidden':>9}", flush=True)
        arguments = ["--rate", str(rate), "--rounds", str(chosen.rounds)]
        try:
            print(run_on_link("tests.benchmarks.bench_overlap", arguments, rate), end="")
        except LinkError as error:
            print(f"not measured: {error}")


if __name__ == "__main__":
    main()
