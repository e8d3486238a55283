"""What spellings cost where sizes do not divide: ``python -m`` this module, beside other planners.

Of all pairs of specs in contiguous blocks of two dims on small meshes, those are taken whose
programs are not what another checkout's are (``--beside DIR``). The first dim has 1 to 64 rows,
the second as many as divide; the busiest rank's bytes are compared, and the worst excess is
printed, and how many are more, as many and less.
"""

import argparse
import json
import random
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

from tests import oracle
from tests.vlshard.exhaustive import may_be

MESHES = [{"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}]
WIDE, ROWS = 48, range(1, 65)


def specs_of(mesh):
    """All specs without orders."""
    every = oracle.specs_of(["plain", "plain"], tuple(mesh))
    return [spec for spec in every if not any(c.order for d in spec.dims for c in d.cuts)]


def serve():
    """Plan what comes in, with the package that is found first; a program or its bytes."""
    from vlshard import MeshShape, transition

    for line in sys.stdin:
        src, dst, sizes, count = json.loads(line)
        mesh = MeshShape(**sizes)
        program = transition(src, dst, mesh)
        said = str(program).split("\n")[1:]
        if count and program.steps:
            tables = (program.describe(itemsize=1, a=rows, b=WIDE) for rows in ROWS)
            said = [int(_MOST.search(table)[1].replace(",", "")) for table in tables]
        print(json.dumps(said if program.steps or not count else [0] * len(ROWS)), flush=True)


class Planner:
    """A process that plans with one checkout."""

    def __init__(self, folder):
        code = f"import sys; sys.path.insert(0, {str(folder)!r}); exec({_SERVE!r})"
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)

    def ask(self, src, dst, mesh, *, count):
        self.process.stdin.write(json.dumps([src, dst, mesh, count]).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


_MOST = re.compile("at most ([0-9,]+) bytes")
_SERVE = f"from runpy import run_path; run_path({__file__!r})['serve']()"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--beside", type=Path, required=True, help="another checkout")
    parser.add_argument("--draw", type=int, default=1000, help="pairs a mesh at most")
    options = parser.parse_args()
    planners = [Planner(Path(__file__).parents[2]), Planner(options.beside)]
    for mesh in MESHES:
        found, number, worst = {"more": 0, "as many": 0, "less": 0}, 0, (1.0, "")
        pairs = [p for p in product(specs_of(mesh), repeat=2) if p[0] != p[1] and may_be(*p)]
        for pair in random.Random(0).sample(pairs, min(len(pairs), options.draw)):
            texts = [*map(oracle.text_of, pair)]
            number += 1
            ours, theirs = (planner.ask(*texts, mesh, count=False) for planner in planners)
            if ours == theirs:
                continue
            sums = (planner.ask(*texts, mesh, count=True) for planner in planners)
            for rows, one, other in zip(ROWS, *sums, strict=True):
                found["more" if one > other else "less" if one < other else "as many"] += 1
                if one > other * worst[0]:
                    said = f"{' -> '.join(texts)} of {rows} rows: {one} bytes, {other} beside"
                    worst = (one / max(other, 1), said)
        print(f"{mesh} {number:,} pairs, of those that differ {found}; worst {worst}", flush=True)


if __name__ == "__main__":
    main()
