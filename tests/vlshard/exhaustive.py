"""Programs against exhaustive search, a simulator and DTensor: ``python -m`` this module.

- Every pair of specs of up to three dims over up to two axes (sizes 2 to 4; plain, joined, nested,
  zigzag, home and pending splits; fused dims; packed dims on three Packings): the program is the
  one that exhaustive search finds, step by step.
- 20,000 drawn pairs over three axes: none costs less than a program that is said to be proven; how
  many are.
- Programs on up to 16 ranks, simulated: every rank's result, the gradients, and the bytes.
- Layouts that DTensor can say: no program sends more than DTensor does.

``--draw N`` takes N pairs of each kind of dims, as ``make test`` does; without it every pair over
up to two axes is checked, with all Packings on up to four ranks and with one of them in turn on
more (``--seed 1`` and ``2`` turn to the others), 1,000 of each kind over three axes; 300 of each
are simulated. ``--sets`` names some of the four.
"""

import argparse
import random
import time
from fractions import Fraction
from functools import lru_cache
from itertools import permutations
from math import lcm
from multiprocessing import Pool
from operator import itemgetter

from tests import oracle
from tests.cheapest import between, cheapest
from tests.cheapest_costs import Costs
from tests.oracle import Case, Size
from tests.simulator import simulate
from tests.vlshard import beside_dtensor
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.programs.transition import transition

MESHES = [
    *({"cp": n} for n in (2, 3, 4)),
    *({"dp": a, "cp": b} for a, b in [(2, 2), (2, 3), (4, 2), (3, 3), (3, 4), (4, 4)]),
]
KINDS = ["plain", "plain plain", "pack", "pack plain", "fused", "fused plain"]
KINDS_OF_THREE = ["plain plain plain", "pack plain plain", "fused plain plain", "pack fused plain"]
SIMULATED = [
    {"dp": 2, "cp": 3},
    {"dp": 4, "cp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
    {"dp": 4, "cp": 4},
]
THREE_AXES = [{"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 3, "c": 4}]
BESIDE_DTENSOR = [{"dp": 2, "cp": 4}, {"dp": 4, "cp": 2}, {"dp": 2, "cp": 2, "tp": 2}]
HOME = (1, 10, 3, 4, 8, 7, 2, 9)
PACKS = [
    Size((8, 4, 12, 0, 4), unit=4),
    Size((4, 2, 2, 6), unit=2),
    Size((3, 1, 5, 2, 2, 4, 1), unit=1),
]


def sizes_of(src, dst, mesh, pack):
    """Sizes for the dims; segments and rows are at home somewhere."""
    found = []
    for a, b in zip(src.dims, dst.dims, strict=True):
        ranks = oracle.count(mesh)
        plain, fused = Size((1,) * 7), Size((ranks, ranks))
        size = {"plain": plain, "fused": fused, "pack": PACKS[pack]}[a.kind]
        cuts = [cut for cut in (*a.cuts, *b.cuts) if cut.order == "home"]
        homes = lcm(*(oracle.ranks_along(cut.axes, mesh) for cut in cuts))
        home = tuple(HOME[k % len(HOME)] % homes for k in range(len(size.lengths)))
        found.append(size._replace(home=home, homes=homes))
    return tuple(found)


def named(src, dst, sizes):
    """Sizes as the package takes them."""
    found = {}
    for a, b, size in zip(src.dims, dst.dims, sizes, strict=True):
        if a.kind == "fused":
            found |= dict(zip("hd", size.lengths, strict=True))
        elif a.kind == "pack":
            found["img"] = Packing(size.lengths, size.unit, size.home, homes=size.homes)
        elif any(cut.order == "home" for cut in (*a.cuts, *b.cuts)):
            found[a.name] = Packing(size.lengths, size.unit, size.home, homes=size.homes)
        else:
            found[a.name] = len(size.lengths)
    return found


@lru_cache
def specs_of(kinds, axes):
    return oracle.specs_of(kinds.split(), axes)


def first_of_its_kind(kinds, src, dst):
    """Whether no order of the plain dims gives a pair that comes earlier."""
    plain = [i for i, kind in enumerate(kinds.split()) if kind == "plain"]
    pairs = [(str(src.dims[i].cuts), str(dst.dims[i].cuts)) for i in plain]
    return list(pairs) == min(map(list, permutations(pairs)))


def pairs_of(kinds, mesh, draw, seed):
    """All pairs, but for those that differ from another by the order of plain dims; or some."""
    specs, rng = specs_of(kinds, tuple(mesh)), random.Random(f"{seed} {kinds} {mesh}")
    if draw is None:
        pairs = ((a, b) for a in specs for b in specs)
        yield from (p for p in pairs if may_be(*p) and first_of_its_kind(kinds, *p))
        return
    while draw:
        pair = tuple(rng.choices(specs, k=2))
        if may_be(*pair):
            draw -= 1
            yield pair


def may_be(src, dst):
    return {*dst.pending} <= {*src.pending}


def program_of(src, dst, mesh, sizes):
    texts = oracle.text_of(src), oracle.text_of(dst)
    return transition(*texts, MeshShape(**mesh), **named(src, dst, sizes))


def check_steps(work):
    """The program of a pair is the cheapest; what is wrong, or the number of states looked at."""
    src, dst, mesh, pack = work
    sizes = sizes_of(src, dst, mesh, pack)
    program, right = program_of(src, dst, mesh, sizes), cheapest(src, dst, mesh, sizes)
    spellings = program.spellings
    found = [kind_of(step) for i, step in enumerate(program.steps) if i not in spellings]
    cost = Fraction(right.cost, right.unit)
    if (program.cost, found, program.proven) != (cost, [*map(kind_of, right.steps)], True):
        return f"{program}\nby exhaustive search: {right}"
    return right.states


def check_costs(work):
    """No program is cheaper if one is said to be proven; what is wrong, or whether it is."""
    src, dst, mesh, pack = work
    sizes = sizes_of(src, dst, mesh, pack)
    program, space = program_of(src, dst, mesh, sizes), Costs(src, dst, mesh, sizes)
    cost = program.cost * space.unit
    right = space.cheapest(cost)
    if cost != right and (right is None or program.proven):
        return f"{program}\nby exhaustive search: {right}, not {cost}"
    if not program.proven:
        times = float(cost / right) if right else 1.0
        print(f"not proven, {times:.3f} times the cheapest: {program.src} -> {program.dst}")
    return int(program.proven)


def side_by_side(pairs, mesh, pack):
    """Pairs in an order in which the same may be between many that come after one another."""
    found = []
    for src, dst in pairs:
        key = between(src, dst, mesh, sizes_of(src, dst, mesh, pack))
        found.append((str((key, src)), src, dst, mesh, pack))
    return [work for _, *work in sorted(found, key=itemgetter(0))]


def kind_of(step):
    """A step as text; an exchange without its axes, which are as it is spelled."""
    text = str(step)
    return text.partition(" over ")[0] if text.startswith("Exchange") else text


def check_values(work):
    """A program's results, gradients and bytes on every rank; what is wrong, or its steps."""
    src, dst, mesh, pack = work
    case = Case(src, dst, sizes_of(src, dst, mesh, pack), pack)
    program = program_of(src, dst, mesh, case.sizes)
    found = simulate(program, case, mesh)
    for rank, block in enumerate(found.results):
        if not (block == oracle.output_of(case, mesh, rank)).all():
            return f"{program}\nrank {rank} ends with other values: {case}"
        sent = [sum(step[rank] for step in way) for way in (found.forward, found.backward)]
        if tuple(sent) != program.bytes_sent(rank=rank, itemsize=1, **named(src, dst, case.sizes)):
            return f"{program}\nrank {rank} sends {sent}: {case}"
    if faults := oracle.gradient_faults(case, mesh, found.gradients):
        return f"{program}\ngradients are wrong at {faults}: {case}"
    return len(program.steps)


def run(pool, check, work, what):
    """Check all; print how many, and stop at the first that is wrong."""
    began, number, total = time.perf_counter(), 0, 0
    for answer in pool.imap_unordered(check, work, chunksize=32):
        if isinstance(answer, str):
            raise SystemExit(f"{what}: {answer}")
        number, total = number + 1, total + answer
    print(
        f"{what:58}{number:8,} pairs {total:11,} {time.perf_counter() - began:8.1f} s", flush=True
    )


def main():
    """Run the checks that the command line names."""
    names = [check.__name__ for check in SETS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draw", type=int, help="pairs of each set; without it all")
    parser.add_argument("--seed", type=int, default=0, help="which pairs are drawn")
    parser.add_argument("--sets", nargs="+", default=names, choices=names)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    with Pool(args.jobs) as pool:
        for check in SETS:
            if check.__name__ in args.sets:
                check(pool, args)


def steps(pool, args):
    """Pairs over up to two axes, step by step."""
    for number, mesh in enumerate(MESHES):
        for kinds in KINDS + KINDS_OF_THREE:
            packs = range(len(PACKS)) if "pack" in kinds else [0]
            few = args.draw is not None or oracle.count(mesh) > 4
            for pack in [packs[(args.seed + number) % len(packs)]] if few else packs:
                work = side_by_side(pairs_of(kinds, mesh, args.draw, args.seed), mesh, pack)
                run(pool, check_steps, work, f"steps   {kinds}, pack {pack}, {mesh}")


def costs(pool, args):
    """Pairs over three axes, and whether programs are proven to be the cheapest."""
    for mesh in THREE_AXES:
        for number, kinds in enumerate(KINDS + KINDS_OF_THREE):
            pairs = pairs_of(kinds, mesh, args.draw or 1000, args.seed)
            work = side_by_side(pairs, mesh, number % len(PACKS))
            run(pool, check_costs, work, f"proven  {kinds}, {mesh}")


def values(pool, args):
    """Programs that are simulated."""
    for mesh in SIMULATED:
        for kinds in KINDS + KINDS_OF_THREE:
            pairs = pairs_of(kinds, mesh, args.draw or 300, args.seed)
            work = ((*pair, mesh, k % 3) for k, pair in enumerate(pairs))
            run(pool, check_values, work, f"values  {kinds}, {mesh}")


def dtensor(_, args):
    """Programs beside DTensor's."""
    for mesh in BESIDE_DTENSOR:
        pairs = [*beside_dtensor.pairs_of(mesh)]
        number = min(len(pairs), (args.draw or len(pairs)) * 5)
        some = random.Random(args.seed).sample(pairs, number)
        print(f"beside DTensor  {mesh}", beside_dtensor.compare(some, mesh), flush=True)


SETS = [steps, costs, values, dtensor]


if __name__ == "__main__":
    main()
