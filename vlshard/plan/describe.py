"""What each rank stores under a plan, as a table: parameters that live alike are one line."""

import re
from dataclasses import dataclass
from math import prod

from vlshard.language import LayoutError, MeshShape, placements, spec
from vlshard.plan.bound_plan import BoundPlan
from vlshard.storage import StoredParameter, unit_of

WHOLE = "whole"
MOST_PADDED, LARGE = 0.1, 2**18  # of what is stored, and elements of 1 MiB in fp32


@dataclass(frozen=True)
class StoredGroup:
    """Parameters of one kind, in all blocks.

    Attributes:
      name: with ``*`` for the number of a block.
      cut: its spec, where a split cuts it; else ``whole``.
      stored: how each of them lives.
      count: how many there are.
    """

    name: str
    cut: str
    stored: StoredParameter
    count: int

    def elements(self, ranks: int) -> tuple[int, int]:
        """Elements that the fullest rank stores of one, and those that FSDP2 stores as padding."""
        shape, dim = self.stored.shape, self.stored.dim
        rows = -(-shape[dim] // ranks)
        held = rows * prod(shape) // shape[dim] if shape[dim] else 0
        return held, held * ranks - prod(shape)


def stored_groups(bound: BoundPlan) -> list[StoredGroup]:
    """The parameters of a model by kind, in the model's order."""
    found: dict[tuple[str, str, StoredParameter], int] = {}
    for name, stored in bound.stored.items():
        layout = bound.parts.layouts.get(name)
        cut = str(layout.spec) if layout else WHOLE
        key = (_starred(name), cut, stored)
        found[key] = found.get(key, 0) + 1
    return [StoredGroup(name, cut, how, n) for (name, cut, how), n in found.items()]


def describe_storage(bound: BoundPlan) -> str:
    """Per kind of parameter: what a rank computes with, and how that is stored.

    Args:
      bound: a plan, bound to a model.
    Returns: a table; ``elements`` counts those of the fullest rank, of one parameter; ``DTensor``
      is what that calls the whole, axis by axis, where it can say it. Below, how often each unit
      is gathered: once for each mesh that its parameters live on.
    """
    mesh = bound.mesh
    rows = [("parameter", "number", "cut", "part", "stored", "elements", "DTensor")]
    for group in stored_groups(bound):
        held, _ = group.elements(mesh.span(group.stored.shard))
        shape = " ".join(map(str, group.stored.shape))
        told = (group.name, str(group.count), group.cut, shape, _place(group), f"{held:,}")
        rows.append((*told, as_dtensor(group, mesh)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *describe_gathers(bound)])


def describe_gathers(bound: BoundPlan) -> list[str]:
    """Per kind of unit, over which axes its parameters are gathered: one gather for each mesh."""
    meshes: dict[str, dict[str, None]] = {}
    for name, stored in bound.stored.items():
        unit = unit_of(name, bound.storages)
        over = meshes.setdefault(_starred(unit) or "the root", {})
        if bound.mesh.span(stored.shard) > 1:
            over[" ".join(stored.shard)] = None
    return [
        f"{unit}: {len(over)} gathers, over {'; over '.join(over)}"
        if len(over) > 1
        else f"{unit}: {'1 gather, over ' + next(iter(over)) if over else 'no gather'}"
        for unit, over in meshes.items()
    ]


def as_dtensor(group: StoredGroup, mesh: MeshShape) -> str:
    """Placements of the whole parameter, one for each part of the mesh, or ``-``.

    DTensor cuts a dim in the order of the mesh, and joins no axes where they do not divide it.
    """
    stored = group.stored
    dims = [str(dim) for dim in spec(group.cut).dims] if group.cut != WHOLE else []
    dims = dims or [f"d{i}" for i in range(len(stored.shape))]
    wide = [part for part in stored.shard if mesh.parts[part] > 1]
    if len(wide) > 1 and stored.shape[stored.dim] % mesh.span(wide):
        return "-"
    dims[stored.dim] += "".join(f"@{part}" for part in wide)
    try:
        return " ".join(map(str, placements(" ".join(dims), mesh)))
    except LayoutError:
        return "-"


def padding_remarks(bound: BoundPlan) -> list[str]:
    """Parameters of which FSDP2 stores and gathers much padding: blocks of unequal rows."""
    remarks: list[str] = []
    for group in stored_groups(bound):
        ranks = bound.mesh.span(group.stored.shard)
        held, padded = group.elements(ranks)
        if padded > LARGE and padded > MOST_PADDED * held * ranks:
            over = bound.mesh.text(group.stored.shard)
            remarks.append(
                f"{group.name} of {group.stored.shape[group.stored.dim]} rows over {over}={ranks}: "
                f"{padded / (held * ranks):.0%} of what is stored and gathered is padding"
            )
    return remarks


def _starred(name: str) -> str:
    """A name with its number of a block left open."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _place(group: StoredGroup) -> str:
    """Where FSDP2 keeps it."""
    stored = group.stored
    shard = f"dim {stored.dim} over {' '.join(stored.shard)}" if stored.shard else ""
    copies = f"copies over {' '.join(stored.replicate)}" if stored.replicate else ""
    return ", ".join(filter(None, (shard, copies))) or "one"
