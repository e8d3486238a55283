"""What planning costs: common arrows, arrows over more axes, hard ones, drawn ones; as tables.

``make bench`` runs it. Common arrows are planned from 50 texts that have not been seen (a dim has
another name each time); ``--beside DIR`` takes turns with the package of another checkout, each in
a process of its own. ``cold`` forgets before each text what was found out about arrows that are
made alike. Times are of the process, not of the clock, which others move, too.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMMON = [
    "b@dp s@cp h d# -> b@dp s h@cp d#",
    "b@dp s h@cp d# -> b@dp s@cp h d#",
    "b s@cp d# -> b s d#",
    "b s d# + tp -> b s d#",
    "b s d# + tp -> b s@tp d#",
    "b@dp s@cp.zigzag h d# -> b@dp s h@cp d#",
    "b@dp.home s@cp.zigzag@tp m# -> b@dp.home s@cp.zigzag m#",
    "b@dp.home s@cp.zigzag m# + tp -> b@dp.home s@cp.zigzag@tp m#",
    "(img@dp.home s)@cp h d# -> (img@dp.home s) h@cp d#",
    "(img@(dp cp).balance s) c# -> (img@dp.home s) c#",
    "(3 h@tp d) m# -> (3 h d) m#@tp",
    "b@dp s@cp h d# -> b s@dp h@cp d#",
]
MORE = [
    "x@a y@b z@c m# -> x@c y@a z@b m#",
    "x@a@b y@c z m# -> x@c y@b@a z m#",
    "x@a@b y z m# + c -> x@c y@a z@b m#",
    "x@a.zigzag y@b z@c m# -> x y@c@a z@b m#",
    "x@a y@b z@c m#@d -> x@b y@c z@d m#@a",
    "x@(a b) y@(c d) m# -> x@(c d) y@(a b) m#",
    "x y z m# + a b c d -> x@a y@b z@c m#@d",
]
TWO = dict.fromkeys("abcdefg", 2)
HARD: list[tuple[str, dict[str, int]]] = [
    ("x y z w v u + a b c d e f -> x@a y@b z@c w@d v@e u@f", TWO),
    (
        "x@a.zigzag@b.zigzag y@c.zigzag@d.zigzag -> x@c.zigzag@d.zigzag y@a.zigzag@b.zigzag",
        dict.fromkeys("abcd", 8),
    ),
    (
        "x@a.zigzag y@b.zigzag z@c.zigzag w@d.zigzag -> "
        "x@d.zigzag y@c.zigzag z@b.zigzag w@a.zigzag",
        dict.fromkeys("abcd", 16),
    ),
    ("x y + a b c d e f g -> x@a@b@c@d@e@f y@g", TWO),
    ("(img@(dp cp).balance s) c -> (img@dp.home s) c", {"dp": 2048, "cp": 32}),
    ("(h@dp d@tp) m -> (h@tp d@dp) m", {"dp": 256, "tp": 256}),
    ("(h@a g@b k@c d@d) m -> (h@b g@c k@d d@a) m", dict.fromkeys("abcd", 16)),
]


def serve() -> None:
    """Plan the arrows that come in, with the package that is found first."""
    import vlshard

    planner = sys.modules["vlshard.programs.transition"]
    for line in sys.stdin:
        arrow, sizes, cold = json.loads(line)
        mesh = vlshard.MeshShape(**sizes)
        if cold:
            names = ("way", "_found")
            for name in names:
                cached = getattr(planner, name, None)
                if cached:
                    cached.cache_clear()
        start = time.process_time()
        try:
            program = vlshard.transition(*arrow.split("->"), mesh)
            said = f"{len(program.steps)} steps, {getattr(program, 'proven', '')}"
        except Exception as error:
            said = repr(error)[:60]
        took = time.process_time() - start
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(json.dumps([took, memory, said]), flush=True)


class Planner:
    """A process that plans with one checkout."""

    def __init__(self, folder: Path) -> None:
        code = f"import sys; sys.path.insert(0, {str(folder)!r}); exec({_SERVE!r})"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)

    def plan(self, arrow: str, sizes: dict[str, int], *, cold: bool = False) -> list[Any]:
        """Seconds, peak memory in MB, and what came of it."""
        if not self._process.stdin or not self._process.stdout:
            raise AssertionError("the process has pipes")
        self._process.stdin.write(json.dumps([arrow, sizes, cold]).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


_SERVE = f"from runpy import run_path; run_path({__file__!r})['serve']()"


def common(planners: list[Planner], rounds: int, *, cold: bool) -> None:
    """A line for each arrow: medians, and the ratio to the other checkout."""
    print(f"{'from texts not seen, cold' if cold else 'from texts not seen':70}      ms")
    for arrow in COMMON + MORE:
        sizes = {"dp": 2, "cp": 4, "tp": 2} if arrow in COMMON else dict.fromkeys("abcd", 2)
        times: list[list[float]] = [[] for _ in planners]
        for n in range(rounds):
            for planner, taken in zip(planners, times, strict=True):
                text = arrow.replace("#", f"{n}{'c' * cold}")
                taken.append(planner.plan(text, sizes, cold=cold)[0] * 1e3)
        medians = [statistics.median(taken[1:]) for taken in times]
        ratio = f"{medians[0] / medians[1]:7.2f}" if len(medians) > 1 else ""
        print(f"{arrow:70}" + "".join(f"{ms:8.3f}" for ms in medians) + ratio, flush=True)


def drawn(rng: random.Random) -> tuple[str, dict[str, int]]:
    """An arrow over up to 16 axes and 16 dims, on up to 65,536 ranks."""
    axes = [f"a{i}" for i in range(rng.randint(1, 16))]
    left, sizes = 16, {}
    for axis in axes:
        bits = rng.randint(1, max(1, min(4, left - len(axes) + len(sizes) + 1)))
        sizes[axis], left = 2**bits, left - bits
    dims = [f"d{i}" for i in range(rng.randint(1, 16))]
    pending = [axis for axis in axes if rng.random() < 0.15]
    sides: list[str] = []
    for side in range(2):
        free = [axis for axis in rng.sample(axes, len(axes)) if side or axis not in pending]
        cut = dict.fromkeys(dims, "")
        while free:
            some = [free.pop() for _ in range(min(len(free), rng.choice([1, 1, 1, 2, 3])))]
            dim = rng.choice(dims)
            joined = f"({' '.join(some)})" if len(some) > 1 else some[0]
            order = ".zigzag" if rng.random() < 0.1 else ""
            if rng.random() < 0.85:
                cut[dim] += f"@{joined}{order}"
        sides.append(" ".join(dim + cuts for dim, cuts in cut.items()))
    return f"{sides[0]}{' + ' * bool(pending)}{' '.join(pending)} -> {sides[1]}", sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--drawn", type=int, default=1000, help="how many texts are drawn")
    parser.add_argument("--beside", type=Path, help="another checkout")
    options = parser.parse_args()
    here = Path(__file__).parents[2]
    planners = [Planner(here), *([Planner(options.beside)] if options.beside else [])]
    for cold in (False, True):
        common(planners, options.rounds, cold=cold)
    print(f"{'hard ones':90}       s   MB more")
    for arrow, sizes in HARD:
        alone = Planner(here)
        first = alone.plan("x -> x", {"a": 2})[1]
        took, memory, said = alone.plan(arrow, sizes)
        print(f"{arrow:90}{took:8.2f}{memory - first:8}  {said}", flush=True)
    rng, alone = random.Random(0), Planner(here)
    first = alone.plan("x -> x", {"a": 2})[1]
    found = [(*alone.plan(*made), made) for made in (drawn(rng) for _ in range(options.drawn))]
    times = sorted(took for took, *_ in found)
    proven = sum(said.endswith("True") for _, _, said, _ in found)
    refused = [said for _, _, said, _ in found if "steps" not in said]
    print(
        f"{options.drawn} drawn: median {times[len(times) // 2]:.2f} s, at most {times[-1]:.2f} s, "
        f"{max(memory for _, memory, *_ in found) - first} MB more, {proven} proven, "
        f"{len(refused)} refused {refused[:1]}"
    )


if __name__ == "__main__":
    main()
