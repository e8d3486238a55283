"""How long layouts of large meshes and sizes take, and the memory that it needs, as a table.

``python -m tests.benchmarks.bench_scale_layout`` runs it; nothing is compared. Texts are drawn, the
same for the same seed: up to 16 axes of a mesh of up to 65,536 ranks, up to 16 dims of all kinds,
each size up to 10**12 as long as the tensor has no more than 2**62 elements. For each, a layout is
bound, two ranks are asked for their shapes, all for their loads, and a program of one step that
undoes, moves or makes other what cuts a dim says what it sends. Planning is not in it.
"""

import argparse
import random
import re
import time
from collections.abc import Callable
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from vlshard import MeshShape, Packing, layout
from vlshard.language import nearest, spec
from vlshard.programs import AllGather, AllReduce, AllToAll, Exchange, Program, Step

RANKS = 2**16
TERA = 10**12


def peak() -> int:
    """The most memory that the process has had, in bytes, since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a processor that work takes, and megabytes that it needs beside what is there."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak(), time.process_time()
    work()
    return time.process_time() - start, (peak() - before) / 2**20


class Drawn:
    """One drawn text with its mesh and sizes, and a program that starts there."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mesh = MeshShape(**self.axes())
        self.free = list(self.mesh.parts)
        self.random.shuffle(self.free)
        self.names = (f"x{i}" for i in count())
        self.sizes: dict[str, int | Packing] = {}
        self.most = 2**62
        self.dims = [self.dim() for _ in range(self.random.randint(1, 16))]
        self.src = " ".join(bare + cuts for bare, cuts in self.dims)
        self.step, self.dst = self.program()

    def axes(self) -> dict[str, int]:
        """Up to 16 axes of up to 65,536 ranks together."""
        sizes, left = [], RANKS
        for _ in range(self.random.randint(1, 16)):
            sizes.append(min(left, self.random.choice([1, 2, 2, 3, 4, 8, 16, 64, 256])))
            left //= sizes[-1]
        sizes[self.random.randrange(len(sizes))] *= max(1, left)
        return {f"a{i}": size for i, size in enumerate(sizes)}

    def splits(self, most: int, *orders: str) -> str:
        """Some splits over axes that nothing uses yet."""
        text = ""
        for _ in range(self.random.randint(0, most)):
            axes = [self.free.pop() for _ in range(min(len(self.free), self.random.randint(1, 3)))]
            if axes:
                text += f"@({' '.join(axes)}){self.random.choice(['', '', *orders])}"
        return text

    def number(self) -> int:
        """A size such that the whole tensor stays within bounds."""
        size = self.random.choice([1, 2, 7, 1024, 10**6 + 3, 2**32, TERA])
        size = min(size, self.most)
        self.most //= size
        return size

    def ranks(self, splits: str) -> int:
        """Ranks of all the axes of some splits."""
        return prod(self.mesh.parts[axis] for axis in re.findall(r"a\d+", splits))

    def dim(self) -> tuple[str, str]:
        """A dim in two parts: what is in its brackets, and the cuts of the whole."""
        kind = self.random.choice(["plain", "plain", "fused", "packed"])
        kind = kind if self.most > 2**28 else "plain"
        name, other = next(self.names), next(self.names)
        if kind == "plain":
            self.sizes[name] = self.number()
            return name, self.splits(3, ".zigzag")
        if kind == "fused":
            inner = [self.splits(1), self.splits(1)]
            for key, splits in zip((name, other), inner, strict=True):
                ranks = self.ranks(splits)
                times = self.random.choice([1, 3, 64])
                self.sizes[key] = ranks * times
                self.most //= ranks * times
            return f"({name}{inner[0]} {other}{inner[1]})", self.splits(1)
        lengths = [
            4 * self.random.randint(0, 1024) for _ in range(self.random.choice([7, 300, 5000]))
        ]
        self.sizes[name] = Packing(lengths, unit=4, cost=(1.0, 500.0))
        self.most //= max(1, sum(lengths))
        return (
            f"({name}{self.splits(1, '.balance')} {other}{self.splits(1, '.zigzag')})",
            self.splits(1),
        )

    def program(self) -> tuple[Step | None, str]:
        """A step from the text to another one."""
        cut = [i for i, (bare, cuts) in enumerate(self.dims) if "@" in bare + cuts]
        if not cut or self.random.random() < 0.1:
            return self.summed()
        i = self.random.choice(cut)
        bare, cuts = self.dims[i]
        dims, label = [bare + cuts for bare, cuts in self.dims], spec(bare).label(0)
        others = [j for j in range(len(dims)) if j != i]
        rest, _, axes = cuts.rpartition("@")
        way = self.random.choice(["gather", "move", "exchange", "exchange"])
        if way == "exchange" or not axes or "." in axes:
            dims[i] = self.changed(i)
            used = re.findall(r"a\d+", bare + cuts)
            return Exchange(tuple(a for a in self.mesh.parts if a in used), label), " ".join(dims)
        if way == "gather" or not others:
            dims[i] = bare + rest
            return AllGather(axes, label), " ".join(dims)
        j = self.random.choice(others)
        dims[i], dims[j] = bare + rest, f"{dims[j]}@{axes}"
        return AllToAll(axes, label, spec(self.dims[j][0]).label(0)), " ".join(dims)

    def changed(self, i: int) -> str:
        """A dim cut over the same axes in another way; factors keep what cuts them."""
        bare, cuts = self.dims[i]
        inner = isinstance(self.sizes[spec(bare).names[0]], Packing)
        axes = re.findall(r"a\d+", bare + cuts if inner else cuts)
        self.random.shuffle(axes)
        if not inner:
            orders = ["", ".zigzag"] if bare.isalnum() else [""]
            return bare + "".join(f"@{axis}{self.random.choice(orders)}" for axis in axes)
        at = sorted(self.random.randint(0, len(axes)) for _ in range(2))
        names = spec(bare).names
        parts = [
            f"@({' '.join(some)}){order}" if some else ""
            for some, order in (
                (axes[: at[0]], ".balance"),
                (axes[at[0] : at[1]], ".zigzag"),
                (axes[at[1] :], ""),
            )
        ]
        return f"({names[0]}{parts[0]} {names[1]}{parts[1]}){parts[2]}"

    def summed(self) -> tuple[Step | None, str]:
        """A sum over whatever nothing cuts; nothing to do where there is no such axis."""
        dst = self.src
        if not self.free:
            return None, dst
        self.src = f"{dst} + {' '.join(self.free)}"
        return AllReduce(f"({' '.join(self.free)})"), dst

    def work(self) -> None:
        """Everything that is asked of a layout."""
        bound = layout(self.src, self.mesh, **self.sizes)
        for rank in (0, self.mesh.size - 1):
            bound.local_shape(rank)
        for dim in range(len(bound.shape)):
            bound.loads(dim)
            bound.imbalance(dim, by="cost")
        bound.owners(tuple(size // 2 for size in bound.shape)) if all(bound.shape) else None
        if self.step:
            one = Program(spec(self.src), spec(self.dst), self.mesh, (self.step,))
            one.describe(**self.sizes)
            one.bytes_sent(rank=self.mesh.size - 1, **self.sizes)


def step(text: str, mesh: MeshShape, made: Step, **sizes: Any) -> None:
    """What one step sends."""
    src, dst = text.split(" -> ")
    Program(spec(src), spec(dst), mesh, (made,)).describe(**sizes)


def cases() -> dict[str, Callable[[], object]]:
    """Large inputs of all kinds, by what they are."""
    tp, wide = MeshShape(tp=8), MeshShape(dp=256, tp=256)
    four = MeshShape(a=16, b=16, c=16, d=16)
    far, axes = MeshShape(dp=2048, cp=32), ("dp", "cp")
    generator = np.random.default_rng(0)
    pack = Packing(
        [4 * int(n) for n in generator.integers(16, 1024, 65_536)],
        unit=4,
        home=sorted(generator.integers(0, 2048, 65_536).tolist()),
        cost=(1, 0),
    )
    few = Packing([1024] * 320, unit=4, home=[i % 32 for i in range(320)], cost=(1, 0))
    fused = {"h": 2**16, "d": 2**16, "m": 64}
    return {
        "local shape of (h@tp d) m, h 10**6": lambda: layout(
            "(h@tp d) m", tp, h=10**6, d=10**3, m=4
        ).local_shape(7),
        "loads of s@(dp tp).zigzag, 10**12": lambda: layout(
            "s@(dp tp).zigzag", wide, s=TERA
        ).loads(),
        "indices of one rank of s@(dp tp), 10**12": lambda: layout(
            "s@(dp tp)", wide, s=TERA
        ).indices(65_535),
        "sent by (h@dp d@tp) m -> (h@tp d@dp) m": lambda: step(
            "(h@dp d@tp) m -> (h@tp d@dp) m", wide, Exchange(("dp", "tp"), "(h d)"), **fused
        ),
        "sent by (h@a g@b k@c d@d) m -> (h@b g@c k@d d@a) m": lambda: step(
            "(h@a g@b k@c d@d) m -> (h@b g@c k@d d@a) m",
            four,
            Exchange(("a", "b", "c", "d"), "(h g k d)"),
            **dict.fromkeys("hgkdm", 256),
        ),
        "65,536 segments to 65,536 ranks by cost, loads": lambda: layout(
            "(img@(dp cp).balance s) c", far, img=pack, c=1152
        ).loads(by="cost"),
        "sent by (img@(dp cp).balance s) c -> (img@dp.home s) c": lambda: step(
            "(img@(dp cp).balance s) c -> (img@dp.home s) c",
            far,
            Exchange(axes, "(img s)"),
            img=pack,
            c=1152,
        ),
        "loads of 320 segments, each cut by 65,536": lambda: layout(
            "(img s@(dp cp)) c", far, img=few, c=1152
        ).loads(by="cost"),
        "sent by s@dp.zigzag@tp.zigzag -> s@tp.zigzag@dp.zigzag": lambda: step(
            "s@dp.zigzag@tp.zigzag -> s@tp.zigzag@dp.zigzag",
            wide,
            Exchange(("dp", "tp"), "s"),
            s=TERA,
        ),
        "the nearest of names of 20,000 letters": lambda: nearest(
            "x" * 20_000, ["y" * 20_000, "x" * 19_999]
        ),
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=300, help="drawn texts")
    parser.add_argument("--worst", type=int, default=5, help="how many of them are listed")
    options = parser.parse_args()
    print(f"{'seconds':>8}{'MB':>7}  what")
    for name, work in cases().items():
        seconds, memory = measured(work)
        print(f"{seconds:8.3f}{memory:7.0f}  {name}", flush=True)
    found: list[tuple[float, float, str, str]] = []
    for seed in range(options.texts):
        drawn = Drawn(seed)
        seconds, memory = measured(drawn.work)
        found.append(
            (
                seconds,
                memory,
                type(drawn.step).__name__ if drawn.step else "-",
                f"{drawn.src}  on {drawn.mesh}",
            )
        )
    seconds, memory = (sorted(one[i] for one in found) for i in (0, 1))
    half = len(found) // 2
    print(f"\n{len(found)} drawn texts: median {seconds[half]:.3f} s, {memory[half]:.0f} MB")
    print(f"at most {seconds[-1]:.3f} s and {memory[-1]:.0f} MB; the slowest:")
    for one in sorted(found, reverse=True)[: options.worst]:
        print(f"{one[0]:8.3f}{one[1]:7.0f}  {one[2]} {one[3][:150]}")


if __name__ == "__main__":
    main()
