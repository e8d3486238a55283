"""Whether a plan computes what another one does: ``python -m model.training.parity``.

Loss and raw gradients of the same rows are computed under the plan and, in a second start, under
the other one (by default in one process); each gradient is compared by itself. Exit status: 0 if
all are alike, 1 if not, 2 if it could not be found out.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from model.training.ranks import start_ranks
from model.training.report import say, warn

RANK_MODULE = "model.training.parity_rank"
LOSSES = "losses.json"
TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-2}
SHARE = 0.1  # of the tolerance, by which a gradient may be off in terms of all gradients
SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """How far the gradient of a parameter is from the reference.

    Attributes:
      name: of the parameter.
      norm: of the reference.
      distance: norm of the difference; inf where only one of them has a gradient.
    """

    name: str
    norm: float
    distance: float

    @property
    def relative(self) -> float:
        """Distance over the reference's norm."""
        return self.distance / self.norm if self.norm else math.inf if self.distance else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two plans; the exit status."""
    options = _parser().parse_args(arguments)
    against_ranks = options.against_ranks or (options.ranks if options.against else 1)
    against = options.against or "plans.single"
    tolerance = options.tolerance or TOLERANCES[options.dtype]
    with tempfile.TemporaryDirectory(prefix="vlshard-parity-") as place:
        runs = {Path(place, "found"): (options.plan, options.ranks)}
        runs[Path(place, "reference")] = against, against_ranks
        for folder, (plan, ranks) in runs.items():
            folder.mkdir()
            given = ["--plan", plan, "--folder", str(folder), *_shared(options)]
            if status := start_ranks(RANK_MODULE, given, ranks, shutdown_timeout=30):
                return status if status > 2 else 2
        found, reference = runs
        losses = [json.loads((folder / LOSSES).read_text()) for folder in (found, reference)]
        differences = sorted(compared(found, reference), key=lambda d: -d.relative)
    names = [f"{plan} ({ranks} rank{'s' * (ranks > 1)})" for plan, ranks in runs.values()]
    say("\n".join(table(*losses, differences, names)))
    faults = judged(*losses, differences, tolerance)
    for fault in faults[:SHOWN]:
        warn(f"differs: {fault}")
    if len(faults) > SHOWN:
        warn(f"and {len(faults) - SHOWN} more differ")
    if not faults:
        say(f"alike within {tolerance:g}: {len(losses[0])} losses, {len(differences)} gradients")
    return int(bool(faults))


def compared(found: Path, reference: Path) -> Iterator[Difference]:
    """Each parameter's gradient beside the reference's; two of them are in memory at a time."""
    names = sorted(
        {path.name for folder in (found, reference) for path in folder.glob("*.safetensors")}
    )
    for name in names:
        yield from _compared(found / name, reference / name)


def _compared(one: Path, other: Path) -> Iterator[Difference]:
    tensors: list[dict[str, Tensor]] = []
    for path in (one, other):
        tensors.append({})
        if path.exists():
            with safe_open(path, framework="pt") as file:
                tensors[-1] = {name: file.get_tensor(name) for name in file.keys()}
    for name in sorted({*tensors[0], *tensors[1]}):
        mine, right = (held.get(name) for held in tensors)
        norm = 0.0 if right is None else float(right.double().norm())
        if mine is None or right is None or mine.shape != right.shape:
            yield Difference(name, norm, math.inf)
        else:
            yield Difference(name, norm, float((mine.double() - right.double()).norm()))


def judged(
    losses: Sequence[float],
    right: Sequence[float],
    differences: Sequence[Difference],
    tolerance: float,
) -> list[str]:
    """What is not alike.

    A gradient may be off by ``tolerance`` times its own norm and a tenth of that times the norm of
    all: sums are taken in another order, and some gradients are rounding alone.

    Args:
      losses: of the plan, by batch.
      right: of the reference.
      differences: of the gradients.
      tolerance: relative.
    """
    faults = [
        f"loss of batch {i}: {a:.7g}, expected {b:.7g}"
        for i, (a, b) in enumerate(zip(losses, right, strict=True), start=1)
        if not abs(a - b) <= tolerance * max(abs(b), 1.0)
    ]
    scale = math.hypot(*(d.norm for d in differences))
    for d in differences:
        if d.distance == math.inf:
            faults.append(f"{d.name}: one of them has no gradient")
        elif not d.distance <= tolerance * (d.norm + SHARE * scale):
            faults.append(f"{d.name}: off by {d.distance:.3g}, {d.relative:.2g} of its norm")
    return faults


def table(
    losses: Sequence[float],
    right: Sequence[float],
    differences: Sequence[Difference],
    names: Sequence[str],
) -> Iterator[str]:
    """Losses side by side, and the gradients that are farthest off, worst first."""
    mine, other = names
    yield f"loss      {mine}   {other}   difference"
    for i, (a, b) in enumerate(zip(losses, right, strict=True), start=1):
        yield f"batch {i:<3} {a:.8f}   {b:.8f}   {abs(a - b):.2e}"
    shown = differences[:SHOWN]
    width = max(map(len, ("gradient", *(d.name for d in shown))))
    yield f"{'gradient':{width}}  relative difference  norm"
    for d in shown:
        yield f"{d.name:{width}}  {d.relative:19.2e}  {d.norm:.3e}"
    if len(differences) > SHOWN:
        yield f"and {len(differences) - SHOWN} that are nearer"


def _shared(options: argparse.Namespace) -> list[str]:
    """The options that both starts get."""
    names = ("model", "data", "batch", "batches", "micro_batch", "seed", "dtype", "device")
    given = [(name, getattr(options, name)) for name in names]
    told = [text for name, value in given if value is not None for text in (_option(name), value)]
    return [*map(str, told), *(["--pack"] if options.pack else [])]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_shared(add: Any) -> None:
    """The options of the command that its ranks have too.

    Args:
      add: a parser's ``add_argument``.
    """
    add("--plan", required=True, help="plan file or module")
    add("--model", required=True, help="Hugging Face folder; weights may be absent")
    add("--data", required=True, help="JSONL file of rows")
    add("--batch", type=int, default=8, help="rows of a batch, over all ranks; default %(default)s")
    add("--batches", type=int, default=1, help="how many; gradients are those of the first")
    add("--micro-batch", type=int, help="rows per data-parallel rank and forward; default all")
    add("--pack", action="store_true", help="join the rows of a forward without padding")
    add("--seed", type=int, default=0, help="of the row order and of new weights")
    add("--dtype", choices=tuple(TOLERANCES), default="float32", help="default %(default)s")
    add("--device", choices=("cpu", "cuda", "npu"), help="default: cuda if there is any, else cpu")


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("python -m model.training.parity", description=about)
    add = parser.add_argument
    add_shared(add)
    add("--ranks", type=int, required=True, help="ranks of the plan")
    add("--against", help="another plan, on as many ranks; default: plans/single.py on one")
    add("--against-ranks", type=int, help="ranks of the other plan")
    add(
        "--tolerance",
        type=float,
        help="relative; default 1e-5, in bfloat16 5e-2",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
