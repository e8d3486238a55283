"""Everything that can be wrong with a plan, found before anything is allocated or sent."""

from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import cast

from vlshard.attention import Mode
from vlshard.comm import Mesh
from vlshard.language import (
    LayoutError,
    MeshShape,
    PlanError,
    ShardError,
    coefficients,
    nearest,
)
from vlshard.plan.model_config import ModelConfig
from vlshard.storage import Storage

KINDS: Mapping[str, tuple[type | UnionType, str]] = {
    "params": (Storage, "replicate() or fsdp(...)"),
    "layouts": (str, "a spec in quotes"),
    "attention": (Mode, "ulysses(...), gather(...), ring(...) or hybrid(...)"),
    "checkpoint": (int, "a count"),
    "splits": (str, "a spec in quotes"),
}

# Fields of attention modes that name mesh axes.
OVER = ("axis", "ulysses", "gather", "ring")


def check_kinds(fields: Mapping[str, object], source: str) -> Iterator[ShardError]:
    """Each field of a plan holds what the other checks take for granted."""
    mesh = fields["mesh"]
    if not isinstance(mesh, Mesh):
        yield PlanError(f"mesh is {mesh!r}, not a Mesh(...)", where=f"{source} mesh")
    for name, (kind, what) in KINDS.items():
        values = fields[name]
        if not isinstance(values, Mapping):
            found = f"{name} is a {type(values).__name__}, not a dict"
            yield PlanError(found, where=f"{source} {name}")
            continue
        for key, value in cast("Mapping[object, object]", values).items():
            if not isinstance(key, str):
                yield PlanError(f"{name} has {key!r} for a name", where=f"{source} {name}")
            if not isinstance(value, kind) or isinstance(value, bool):
                where = f"{source} {name} {key!r}"
                yield PlanError(f"{value!r} is not {what}", where=where)
            elif not all(isinstance(getattr(value, at, None), str | None) for at in OVER):
                yield PlanError(f"{value} names no mesh axis", where=f"{source} {name} {key!r}")


def check_world(mesh: MeshShape, world: int, source: str) -> Iterator[ShardError]:
    """The mesh has as many places as there are ranks, and is all of them."""
    if mesh.size != world:
        yield PlanError(
            f"mesh {mesh} has {mesh.size} ranks, the world has {world}",
            where=f"{source} mesh",
            notes=[f"fix: start {mesh.size} ranks, or a mesh whose sizes multiply to {world}"],
        )
    elif isinstance(mesh, Mesh) and list(mesh.ranks) != list(range(world)):
        yield PlanError(
            f"a plan's mesh is the whole world in order, not ranks {list(mesh.ranks)[:8]}",
            where=f"{source} mesh",
            notes=["fix: leave ranks= out"],
        )


def check_checkpoint(
    checkpoint: Mapping[str, int], config: ModelConfig, source: str
) -> Iterator[ShardError]:
    """Recomputation names sites, and counts of 1 and more."""
    for site, every in checkpoint.items():
        if site not in config.heads or every < 1:
            yield PlanError(
                f"checkpoint takes a site and a count of at least 1, not {site!r}: {every}",
                where=f"{source} checkpoint",
                notes=[f"sites: {', '.join(config.heads)}"],
            )


def check_regather(sites: object, config: ModelConfig, source: str) -> Iterator[ShardError]:
    """Gathering again names sites."""
    if not isinstance(sites, tuple | list):
        offer = f"({sites!r},)" if sites in config.heads else '("text",)'
        yield PlanError(
            f"regather is {sites!r}, not a tuple of sites",
            where=f"{source} regather",
            notes=[f"fix: {offer}"],
        )
        return
    for site in cast("Iterable[object]", sites):
        if site not in config.heads:
            yield PlanError(
                f"regather names no site {site!r}{nearest(str(site), config.heads)}",
                where=f"{source} regather",
                notes=[f"sites: {', '.join(config.heads)}"],
            )


def check_cost(cost: tuple[float, float] | None, source: str) -> Iterator[ShardError]:
    """The coefficients of dealing are two numbers of at least 0."""
    if cost is not None:
        try:
            coefficients(cost)
        except LayoutError:
            headline = f"cost={cost!r} is not two finite numbers (a, b) of at least 0"
            yield PlanError(headline, where=f"{source} cost")
