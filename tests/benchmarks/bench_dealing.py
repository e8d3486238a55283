"""Layouts of the patches for lists of images: balance, bytes, predicted and measured time.

``make bench`` runs it. Predictions are for eight ranks of an accelerator and a vision block of the
released model's width; measurements are of one block, forward and backward, on four CPU ranks with
every image a sixteenth as long. Beside this project's layouts stands what others do: the whole
tower on every rank of a group, whole frames by count, an even cut padded to the largest rank with
all-to-all, and a gather of all merged rows with all DeepStack levels to all ranks.
"""

import argparse
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from model.config.config import Config
from model.modules.adapters import VisionBlock
from model.rope import vision_rope
from tests.benchmarks.launch import inside_ranks, on_ranks
from tests.tiny import tiny_raw
from vlshard import (
    Mesh,
    MeshShape,
    Packing,
    Plan,
    advise_patches,
    gather,
    layout,
    replicate,
    ulysses,
)
from vlshard.attention.modes import Mode
from vlshard.plan.header import SampleFacts, make_headers
from vlshard.plan.step_boundaries import StepBoundaries

UNIT, SHRINK = 4, 16
RELEASED = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
SMALL = {"hidden_size": 192, "intermediate_size": 768, "num_heads": 4, "out_hidden_size": 128}
MESH = MeshShape(dp=2, cp=4)
FLOPS, BANDWIDTH = 4e14, 5e10
LEVELS = 1 + len(RELEASED["deepstack_visual_indexes"])


def images() -> dict[str, list[int]]:
    """Patches of each frame, by kind of list."""
    draw = np.random.default_rng(7)
    drawn = np.exp(draw.normal(7.0, 1.2, size=48)).clip(64, 16384)
    frames = draw.integers(8, 65, size=6)
    return {
        "all equal": [1024] * 48,
        "documents and photos": [int(n) // 64 * 64 for n in drawn],
        "one huge among thumbnails": [16384, *[256] * 47],
        "videos of 8 to 64 frames": [256] * int(frames.sum()),
    }


def predicted(lengths: list[int]) -> None:
    """Print what each layout is predicted to take, and what others do."""
    config = Config.from_dict(tiny_raw(text={"hidden_size": 2048}, vision=RELEASED))
    rows = advise_patches(lengths, MESH, config, BANDWIDTH, FLOPS)
    print(f"{'predicted, ' + str(MESH):44}{'ms/block':>9}{'max/mean':>10}{'MB sent':>9}")
    for row in rows:
        mode = "" if row.mode is None else f" {type(row.mode).__name__.lower()}"
        line(row.patches + mode, row.seconds, row.imbalance, row.sent)
    counted = counts(lengths, "(img@(dp cp) s) c", config)
    line("others: whole frames by count", *counted, 0)
    alone = next(row for row in rows if row.patches == "(img@dp.home s) c")
    line("others: whole tower on each of a group", alone.seconds, alone.imbalance, 0)
    padded = -(-max(lengths) // (UNIT * MESH.sizes["cp"])) * UNIT * MESH.sizes["cp"]
    rows = advise_patches([padded] * len(lengths), MESH, config, BANDWIDTH, FLOPS)
    even = next(row for row in rows if type(row.mode).__name__ == "Ulysses")
    line("others: padded even cut, all-to-all", even.seconds, even.imbalance, even.sent)
    merged, width = sum(lengths) // UNIT, LEVELS * RELEASED["out_hidden_size"] * 2
    ours = merged // MESH.size * width
    print(
        f"hand-off of {merged:,} merged rows, {LEVELS} levels: each row once {ours / 1e6:,.0f} MB "
        f"a rank, gather to all {ours * (MESH.size - 1) / 1e6:,.0f} MB a rank"
    )


def counts(lengths: list[int], text: str, config: Config) -> tuple[float, float]:
    """Predicted time and imbalance of whole frames under any layout."""
    packing = Packing(lengths, UNIT, cost=config.patch_cost)
    where = layout(text, MESH, img=packing, c=1)
    return where.loads(by="cost").max() * 6 / FLOPS, where.imbalance(by="cost")


def line(name: str, seconds: float, imbalance: float, sent: int) -> None:
    """Print one row."""
    print(f"{name:44}{seconds * 1e3:9.2f}{imbalance:10.2f}{sent / 1e6:9.1f}", flush=True)


class Contender(NamedTuple):
    """A layout that is measured, on frames that may be padded."""

    name: str
    patches: str
    mode: Mode | None
    lengths: list[int]


def contenders(lengths: list[int], shape: MeshShape, config: Config) -> list[Contender]:
    """This project's layouts, best predicted first, and what others do."""
    rows = advise_patches(lengths, shape, config, 1e9, 3e10, itemsize=4)
    ours = [
        Contender(
            row.patches + (f" {row.mode}" if row.mode else ""), row.patches, row.mode, lengths
        )
        for row in rows
    ]
    step = UNIT * shape.sizes["cp"]
    padded = [-(-max(lengths) // step) * step] * len(lengths)
    return [
        *ours,
        Contender("others: whole frames by count", "(img@(dp cp) s) c", None, lengths),
        Contender("others: whole tower on each of a group", "(img@dp.home s) c", None, lengths),
        Contender("others: padded even cut", "(img@dp.home s@cp) c", ulysses("cp"), padded),
    ]


def measured(lengths: list[int], rounds: int) -> None:
    """Print the time of one block on this world's ranks, layout by layout in turn."""
    config = Config.from_dict(tiny_raw(text={"hidden_size": 128}, vision=SMALL))
    shape = MeshShape(dp=2, cp=2)
    block = VisionBlock(config.vision)
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    steps: dict[str, StepBoundaries] = {}
    found = {one.name: one for one in contenders(lengths, shape, config)}
    for name, one in found.items():
        modes = {"text": gather("cp")} | ({"vision": one.mode} if one.mode else {})
        plan = Plan(
            mesh=Mesh(dp=2, cp=2),
            params={"**": replicate()},
            layouts={"vision.patches": one.patches, "text.tokens": "b@dp.home s@cp.zigzag m"},
            attention=modes,
        )
        steps[name] = plan.bind(config, 4).step(header_of(one.lengths))
    times = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, at in steps.items():
            seconds = torch.tensor(timed(block, at, config))
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn:
                times[name].append(float(seconds))
    if dist.get_rank() == 0:
        print(f"{'measured, ' + str(shape):54}{'ms/block':>9}")
        for name, seconds in times.items():
            print(f"{name:54}{statistics.median(seconds) * 1e3:9.2f}", flush=True)


def header_of(lengths: list[int]):
    """A micro-batch with one image a sample, half of the samples on each data-parallel rank."""
    facts = [
        SampleFacts(i, n // UNIT + 2, 1, ((1, 2, n // 2),), (1,)) for i, n in enumerate(lengths)
    ]
    return make_headers(facts, 2)[0]


def timed(block: VisionBlock, at, config: Config) -> float:
    """Seconds of one block on this rank's rows, forward and backward."""
    rows = len(at.share.patches)
    x = torch.randn(rows, config.vision.hidden_size, requires_grad=True)
    coords = torch.zeros(rows, 2, dtype=torch.int64)
    rope = vision_rope(coords, width=config.vision.head_dim, theta=config.vision.rope_theta)
    dist.barrier()
    start = time.perf_counter()
    block(x, rope, at).square().sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    if inside_ranks():
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        for name, lengths in images().items():
            if dist.get_rank() == 0:
                print(f"\n{name}, {len(lengths)} frames, a sixteenth of the length")
            short = [max(n // SHRINK // UNIT, 1) * UNIT for n in lengths]
            measured(short, chosen.rounds)
        dist.destroy_process_group()
        return
    for name, lengths in images().items():
        print(f"\n{name}, {len(lengths)} frames, {sum(lengths):,} patches")
        predicted(lengths)
    print(on_ranks("tests.benchmarks.bench_dealing", sys.argv[1:], world=4), end="")


if __name__ == "__main__":
    main()
