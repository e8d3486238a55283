"""What planning costs the host at thousands of ranks: header, bind, describe and a step of a rank.

``make bench`` runs it, in one process and without ranks: a rank's plan is made as that rank has it
(``BoundPlan.seen_from``). Every data-parallel rank of eight reads one sample with two images of 256
to 6,084 patches. Times are of one thread's processor, the best of three draws; memory is what
numpy and Python take at their peak. It fails where an aim is missed.
"""

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from model.config.config import Config
from tests.tiny import tiny_raw
from vlshard import (
    Mesh,
    MeshShape,
    Packing,
    Plan,
    fsdp,
    gather,
    layout,
    replicate,
    transition,
    ulysses,
)
from vlshard.plan import FactTable, SampleFacts, StepHeader, Told, make_headers, merge_told

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
CP = 8
PATCHES = {
    "(img@dp.home s) c": None,
    "(img@dp.home@cp.balance s) c": None,
    "(img@(dp cp).balance s) c": None,
    "(img@dp.home s)@cp c": gather("cp"),
    "(img@dp.home s@cp) c": ulysses("cp"),
}
TOKENS = {"padded": "b@dp.home s@cp.zigzag m", "packed": "(smp@dp.home s@cp.zigzag) m"}
OVER_ALL = "(img@(dp cp).balance s) c"
# Inside a data rank's group, inside each part of a split data axis, over all.
DEALT = ("(img@dp.home@cp.balance s) c", "(img@dp.0.home@(dp.1 cp).balance s) c", OVER_ALL)
DRAWS, SEEDS = 3, count()
MB = 2**20
# Most seconds of a step: where frames stay with their data rank, and where they are dealt over all.
AIMS = {4096: (0.1, 0.1), 65536: (0.3, 0.5)}
MOST_MB, BIND, HEADER = 200, 1.0, 0.5


def draw_facts(samples: int, seed: int) -> list[SampleFacts]:
    """Samples of two images and some text."""
    draw = np.random.default_rng(seed)
    sides = draw.integers(8, 40, size=(samples, 2)) * 2
    found: list[SampleFacts] = []
    for row, (first, second) in enumerate(sides.tolist()):
        grids = ((1, first, first), (1, second, second))
        begin = 8 + first * first // 4
        tokens = begin + second * second // 4 + 40
        found.append(SampleFacts(row, tokens, 30, grids, (4, begin + 2), ((tokens - 31, 30),)))
    return found


def plan_of(patches: str, tokens: str, world: int) -> Plan:
    """A plan on ``world`` ranks, eight of which share what they read."""
    mode = PATCHES[patches]
    return Plan(
        mesh=Mesh(dp=world // CP, cp=CP),
        params={"model.visual.**": replicate(), "**": fsdp("dp cp")},
        layouts={"vision.patches": patches, "text.tokens": tokens},
        attention={**({"vision": mode} if mode else {}), "text": gather("cp")},
    )


def seconds(call: Callable[[], object]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def peak_mb(call: Callable[[], object]) -> float:
    """Memory that a call takes at its peak [MiB]."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / MB


def new_header(world: int) -> StepHeader:
    """A header of a draw of its own, not yet looked into."""
    facts = draw_facts(world // CP, next(SEEDS))
    return make_headers(FactTable.of(facts), world // CP)[0]


def header_row() -> bool:
    """Time of a header of 100,000 samples."""
    facts = draw_facts(100_000, 0)
    best, size = 1e9, 0
    for _ in range(DRAWS):
        start = time.process_time()
        data = Told(np.arange(len(facts)), FactTable.of(facts)).pack()
        (header,) = make_headers(merge_told([data], len(facts)), 4096)
        assert len(header.segments) == len(header.segment_home) == 200_000
        best, size = min(best, time.process_time() - start), len(data)
    aim(f"header of 100,000 samples, {size / MB:.0f} MiB: made, told, read", best, HEADER)
    return best <= HEADER


def aim(what: str, found: float, most: float) -> None:
    """One line with an aim."""
    print(f"{what:64}{found:8.3f} s  aim {most} s", "" if found <= most else " MISSED", flush=True)


def steps(world: int, config: Config) -> bool:
    """Table of a step's cost, layout by layout."""
    fine = True
    print(f"\n{world:,} ranks, Mesh(dp={world // CP}, cp={CP})")
    print(f"{'vision.patches':32}{'text':8}{'step ms':>9}{'MiB':>7}{'aim ms':>8}")
    for patches in PATCHES:
        for name, tokens in TOKENS.items():
            bound = plan_of(patches, tokens, world).bind(config, world)
            found: list[float] = []
            for turn in range(DRAWS):
                seen, header = bound.seen_from(world // 3 + 5 * turn), new_header(world)
                found.append(seconds(lambda seen=seen, header=header: seen.step(header)))
            seen, header = bound.seen_from(world // 2 + 3), new_header(world)
            peak = peak_mb(lambda seen=seen, header=header: seen.step(header))
            most = AIMS[world][patches == OVER_ALL] if world in AIMS else float("inf")
            missed = min(found) > most or (world in AIMS and peak > MOST_MB)
            fine = fine and not missed
            line = f"{patches:32}{name:8}{1e3 * min(found):9.1f}{peak:7.1f}{1e3 * most:8.0f}"
            print(line, " MISSED" if missed else "", flush=True)
    return fine


def balance(worlds: Sequence[int], config: Config) -> None:
    """Table of the busiest rank's work over the mean, by how far frames may go."""
    print(
        "\nthe busiest rank's work over the mean, frames dealt inside 8 ranks, inside 64, over all"
    )
    for images in (16, 64):
        for world in worlds:
            draw = np.random.default_rng(world + images)
            data = world // CP
            sides = 2 * draw.integers(8, 40, size=data * images)
            home = np.repeat(np.arange(data), images)
            pack = Packing(
                (sides * sides).tolist(), 4, home.tolist(), config.patch_cost, homes=data
            )
            mesh = MeshShape(dp=(world // 64, 64 // CP), cp=CP)
            uneven = [layout(w, mesh, img=pack, c=1).imbalance(by="cost") for w in DEALT]
            cells = "".join(f"{each:8.3f}" for each in uneven)
            print(f"{images:4} images a reading rank, {world:5,} ranks{cells}", flush=True)


def once(world: int, config: Config) -> bool:
    """Time to bind a plan and to describe a deal and a program."""
    plan = plan_of(OVER_ALL, TOKENS["padded"], world)
    bound = plan.bind(config, world)
    lengths = [256] * (2 * world // CP)
    home = [i // 2 for i in range(len(lengths))]
    sizes = {"img": Packing(lengths, unit=4, home=home), "c": 1152}
    mesh = MeshShape(dp=world // CP, cp=CP)
    moved = transition("(img@dp.home s) c", "(img@(dp cp).balance s) c", mesh, **sizes)
    header = new_header(world)
    rows = {
        "bind": lambda: plan_of(OVER_ALL, TOKENS["packed"], world).bind(config, world),
        "describe a deal": lambda: bound.describe_deal(header),
        "describe a program": lambda: moved.describe(**sizes),
    }
    found = {name: min(seconds(call) for _ in range(DRAWS)) for name, call in rows.items()}
    for name, best in found.items():
        aim(f"{world:,} ranks: {name}", best, BIND)
    return max(found.values()) <= BIND


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=(64, 512, 4096, 65536))
    worlds = parser.parse_args().worlds
    config = Config.from_dict(tiny_raw(text={"hidden_size": 2048}, vision=RELEASED))
    fine = [header_row(), *(once(world, config) for world in worlds)]
    fine += [steps(world, config) for world in worlds]
    balance([world for world in worlds if 64 <= world <= 4096], config)
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
