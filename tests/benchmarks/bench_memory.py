"""Peak bytes of live tensors in the vision tower, per rank, for one large image over cp ranks.

``make bench`` runs it. Weights, their gradients and the patches themselves do not count; what does
is all that one forward and backward pass makes. The ideal is the bytes of one rank divided by the
ranks.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn

from model.config.config import Config
from model.data.inputs import VisionInputs
from model.data.positions import coords_of_patches, corners_of_patches
from model.modules.adapters import VisionTower
from model.modules.init import fill
from tests.benchmarks.launch import inside_ranks, on_ranks
from tests.benchmarks.live_bytes import LiveBytes
from tests.tiny import tiny_raw
from vlshard import Mesh, Plan, gather, replicate, ring, ulysses
from vlshard.plan.header import SampleFacts, make_headers

SIDE = 64
VISION = {
    "depth": 4,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_heads": 8,
    "patch_size": 16,
    "out_hidden_size": 256,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [1, 3],
}
MODES = {"gather": gather("cp"), "ulysses": ulysses("cp"), "ring": ring("cp")}


def peak(mode: str, every: int) -> int:
    """Bytes of the fullest rank of this world."""
    config = Config.from_dict(tiny_raw(text={"hidden_size": 256}, vision=VISION))
    cp = dist.get_world_size()
    plan = Plan(
        mesh=Mesh(dp=1, cp=cp),
        params={"**": replicate()},
        layouts={"vision.patches": "(img@dp.home s)@cp c", "text.tokens": "b@dp.home s m"},
        attention={"vision": MODES[mode]},
    )
    facts = SampleFacts(0, SIDE * SIDE // 4 + 2, 1, ((1, SIDE, SIDE),), (1,))
    at = plan.bind(config, cp).step(make_headers([facts], 1)[0])
    tower = VisionTower(config.vision)
    fill(nn.ModuleDict({"model": nn.ModuleDict({"visual": tower})}), config, 0)
    inputs = patches_of(at.share.patches, config)
    for weight in tower.parameters():  # as after a first step: they are no cost of this pass
        weight.grad = torch.zeros_like(weight)
    with LiveBytes() as counted:
        out = tower(inputs, at, every)
        out.float().square().mean().backward()
    most = torch.tensor(counted.peak)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def patches_of(rows, config: Config) -> VisionInputs:
    """The inputs of some patches of the image."""
    coords = coords_of_patches(rows, SIDE, merge=2)
    sizes = torch.tensor([[SIDE, SIDE]]).expand(len(rows), 2).numpy()
    corners, weights = corners_of_patches(coords, sizes, side=config.vision.position_side)
    pixels = torch.randn(len(rows), config.vision.patch_width)
    return VisionInputs(pixels, *map(torch.from_numpy, (coords, corners, weights)))


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_known_args()
    if inside_ranks():
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        found = [peak(mode, every) for mode in MODES for every in (0, 1)]
        if dist.get_rank() == 0:
            print(*found)
        dist.destroy_process_group()
        return
    worlds = {
        cp: list(map(int, on_ranks("tests.benchmarks.bench_memory", [], cp).split()))
        for cp in (1, 2, 4)
    }
    print(f"one image of {SIDE * SIDE:,} patches, {VISION['depth']} blocks, fp32, CPU ranks")
    print(
        f"{'mode':10}{'recompute':>10}{'cp 1 MB':>10}"
        + "".join(f"{f'cp {cp} MB':>10}{'of ideal':>10}" for cp in (2, 4))
    )
    for i, (mode, every) in enumerate((mode, every) for mode in MODES for every in (0, 1)):
        whole = worlds[1][i]
        cells = "".join(
            f"{worlds[cp][i] / 1e6:10.1f}{whole / cp / worlds[cp][i]:10.2f}" for cp in (2, 4)
        )
        print(
            f"{mode:10}{'each' if every else 'none':>10}{whole / 1e6:10.1f}{cells}", file=sys.stdout
        )


if __name__ == "__main__":
    main()
