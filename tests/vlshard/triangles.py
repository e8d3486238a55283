"""No program costs more than two others through a third spec: ``python -m`` this module.

Of 60 specs a mesh (plain dims in blocks, zigzag and by home, fused dims, pending sums) all triples
are compared: A -> C with A -> B and B -> C, where B uses axes that A or C name, with orders that A
or C have on the same dim, cuts factors, and rows by home, over ranks that divide those of A or C
there, and all three are arrows. Not compared are triples with a program that is not proven to be
the cheapest; they are counted.

``--beyond N`` draws N triples that are no such ones instead, also of packed dims, and prints how
many are beaten, and by how much.
"""

import argparse
import random
import time
from fractions import Fraction
from functools import cache
from itertools import product

from tests import oracle
from tests.vlshard.exhaustive import may_be
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.programs.transition import transition

MESHES = [{"a": 2, "b": 2}, {"a": 4, "b": 2}, {"a": 8, "b": 4}, {"a": 2, "b": 2, "c": 2}]
KINDS = ["plain plain plain", "fused plain", "plain plain fused", "plain plain"]
SIZES = {"h": 64, "d": 64}


def specs_of(mesh, number, seed=0):
    """Some specs of each of the dims that are compared, those without orders among them."""
    found = []
    for kinds in KINDS:
        every = oracle.specs_of(kinds.split(), tuple(mesh))
        plain = [s for s in every if not any(c.order for d in s.dims for c in d.cuts)]
        rng = random.Random(f"{seed} {kinds} {mesh}")
        share = number // len(KINDS)
        some = rng.sample(plain, min(share // 2, len(plain)))
        rest = [spec for spec in every if spec not in some]
        found.append(some + rng.sample(rest, min(share - len(some), len(rest))))
    return found


@cache
def orders_of(spec):
    return [{cut.order for cut in dim.cuts if cut.order} for dim in spec.dims]


@cache
def numbers_of(spec, sizes):
    """By how many ranks each factor is cut, and each dim by home."""
    found, mesh = [], dict(sizes)
    for dim in spec.dims:
        for marks in (["h"], ["d"], ["home"]):
            cuts = [cut for cut in dim.cuts if cut.slot in marks or cut.order in marks]
            found.append(oracle.ranks_along([axis for cut in cuts for axis in cut.axes], mesh))
    return found


def between(a, b, c, mesh):
    """Whether b stays with the axes and orders of a and c, and both ways are arrows."""
    if not (may_be(a, b) and may_be(b, c)):
        return False
    if not oracle.axes_of(b) <= oracle.axes_of(a) | oracle.axes_of(c):
        return False
    orders = zip(*map(orders_of, (a, b, c)), strict=True)
    if not all(own <= before | after for before, own, after in orders):
        return False
    limits = zip(*(numbers_of(spec, tuple(mesh.items())) for spec in (a, b, c)), strict=True)
    return all(own == 1 or before % own == 0 or after % own == 0 for before, own, after in limits)


def planned(specs, mesh):
    """The programs of all pairs."""
    shape, found = MeshShape(**mesh), {}
    for a, b in product(specs, repeat=2):
        if a != b and may_be(a, b):
            texts = oracle.text_of(a), oracle.text_of(b)
            sizes = SIZES if "(h" in texts[0] else {}
            found[a, b] = transition(*texts, shape, **sizes)
    return found


def beaten(specs, programs, mesh):
    """The triples compared, those not proven, and those beaten, each with by how much."""
    number, open_, faults = 0, 0, []
    for a, b, c in product(specs, repeat=3):
        if len({a, b, c}) < 3 or not between(a, b, c, mesh):
            continue
        number += 1
        direct, first, last = programs[a, c], programs[a, b], programs[b, c]
        if not (direct.proven and first.proven and last.proven):
            open_ += 1
        elif direct.cost > first.cost + last.cost:
            faults.append((direct.cost / (first.cost + last.cost), direct, first, last))
    return number, open_, faults


def beyond(kinds, mesh, number, seed):
    """Of some triples that nothing is said about, how many are beaten, and the worst."""
    rng, shape = random.Random(f"{seed} beyond {kinds} {mesh}"), MeshShape(**mesh)
    specs = oracle.specs_of(kinds.split(), tuple(mesh))
    ranks, faults = shape.size, [(Fraction(0), "")]
    home = [i % ranks for i in range(2 * ranks)]
    pack = {"img": Packing([2 * ranks] * 2 * ranks, home=home, homes=ranks)}
    sizes = {**(pack if "pack" in kinds else {}), **(SIZES if "fused" in kinds else {})}
    for _ in range(number):
        a, b, c = rng.choices(specs, k=3)
        while not (may_be(a, b) and may_be(b, c)) or (
            "pack" not in kinds and between(a, b, c, mesh)
        ):
            a, b, c = rng.choices(specs, k=3)
        ways = [(a, c), (a, b), (b, c)]
        direct, *both = (transition(*map(oracle.text_of, way), shape, **sizes) for way in ways)
        detour = sum(program.cost for program in both)
        if direct.cost > detour:
            ratio = direct.cost / detour if detour else Fraction(10**9)
            faults.append((ratio, f"{direct.src} -> {both[0].dst} -> {direct.dst}"))
    return len(faults) - 1, max(faults, key=lambda fault: fault[0])


def main():
    """Compare, and print how long planning took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--specs", type=int, default=60, help="specs a mesh, of all kinds of dims")
    parser.add_argument("--each", type=int, help="specs a mesh of each kind of dims instead")
    parser.add_argument("--axes", type=int, help="meshes of so many axes only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beyond", type=int, help="triples of each kind beyond the claim instead")
    args = parser.parse_args()
    for mesh in (m for m in MESHES if args.axes in (None, len(m))):
        for kinds in [*KINDS, "pack plain"] if args.beyond else ():
            number, (ratio, said) = beyond(kinds, mesh, args.beyond, args.seed)
            print(
                f"{kinds:20} {mesh!s:26} {args.beyond:6,} triples {number:5,} beaten, "
                f"by {float(ratio):.3f} at most: {said}",
                flush=True,
            )
        if args.beyond:
            continue
        for kinds, specs in zip(
            KINDS,
            specs_of(mesh, args.each * len(KINDS) if args.each else args.specs, args.seed),
            strict=True,
        ):
            began = time.perf_counter()
            programs = planned(specs, mesh)
            took = time.perf_counter() - began
            number, open_, faults = beaten(specs, programs, mesh)
            worst = max((fault[0] for fault in faults), default=Fraction(0))
            print(
                f"{kinds:20} {mesh!s:26} {len(programs):6,} plans {took:6.1f} s "
                f"{number:8,} triples "
                f"{open_:5,} not proven {len(faults):5,} beaten, by {float(worst):.3f} at most",
                flush=True,
            )
            if faults:
                raise SystemExit("\n".join(map(str, faults[0])))


if __name__ == "__main__":
    main()
