"""Whether a plan stores every parameter, over axes that there are, unit by unit."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from vlshard.language import MeshShape, PlanError, ShardError
from vlshard.plan.model_config import ModelConfig
from vlshard.plan.place import Place
from vlshard.storage import Storage, unit_of


def pattern_matcher(pattern: str) -> Callable[[str], bool]:
    """A test of parameter names: ``*`` is anything within one part, ``**`` anything at all."""
    parts = re.split(r"(\*\*|\*)", pattern)
    regex = "".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts)
    compiled = re.compile(regex)
    return lambda name: compiled.fullmatch(name) is not None


def check_storage(
    params: Mapping[str, Storage], mesh: MeshShape, config: ModelConfig, source: str
) -> Iterator[ShardError]:
    """Axes exist and occur once, every pattern is of use, every unit has one storage."""
    for pattern, storage in params.items():
        place = Place(source, "params").of(pattern)
        named = (*storage.shard, *storage.replicate)
        unknown = [axis for axis in named if axis not in mesh.parts_of]
        if unknown:
            yield PlanError(
                f"{mesh.unknown(unknown[0])} in {storage}",
                where=f"{place} {pattern!r}",
                notes=[mesh.offer(unknown[0])],
            )
        elif len(set(parts := _expand(named, mesh))) < len(parts):
            yield PlanError(f"an axis occurs twice in {storage}", where=f"{place} {pattern!r}")
        elif (cut := _expand(storage.shard, mesh)) != sorted(cut, key=list(mesh.parts).index):
            ordered = sorted(
                storage.shard, key=lambda a: list(mesh.parts).index(mesh.parts_of[a][0])
            )
            yield PlanError(
                f"parameters are sharded in mesh order only, not over {' '.join(storage.shard)!r}",
                where=f"{place} {pattern!r}",
                notes=[f"fix: fsdp({' '.join(ordered)!r})"],
            )
    names = config.parameter_shapes()
    chosen = storage_patterns(params, names)
    for pattern in params:
        if pattern not in chosen.values():
            reason = "matches nothing"
            fix = f"the name most like it is {_most_like(pattern, names)!r}"
            if any(map(pattern_matcher(pattern), names)):
                reason = "matches only what earlier patterns match"
                fix = "fix: remove it, or move it before the more general patterns"
            place = Place(source, "params").of(pattern)
            yield PlanError(f"pattern {pattern!r} {reason}", where=place, notes=[fix])
    left = [name for name in names if name not in chosen]
    if left:
        yield PlanError(
            f"{len(left)} parameters have no storage, the first is {left[0]!r}",
            where=f"{source} params",
            notes=['fix: end params with "**": replicate() or fsdp(...)'],
        )
    yield from _one_storage_a_unit(params, chosen, config, source)


def _most_like(pattern: str, names: Collection[str]) -> str:
    """The first of the names that begin most as a pattern does."""
    stem = pattern
    while not any(name.startswith(stem) for name in names):
        stem = stem[:-1]
    return next(name for name in names if name.startswith(stem))


def _expand(axes: Iterable[str], mesh: MeshShape) -> list[str]:
    """The parts of axes that exist, those named twice too."""
    return [part for axis in axes for part in mesh.parts_of[axis]]


def storage_patterns(params: Mapping[str, Storage], names: Mapping[str, object]) -> dict[str, str]:
    """The pattern that decides each parameter: the first that matches."""
    tests = [(pattern, pattern_matcher(pattern)) for pattern in params]
    first = {name: next((p for p, test in tests if test(name)), None) for name in names}
    return {name: pattern for name, pattern in first.items() if pattern is not None}


def _one_storage_a_unit(
    params: Mapping[str, Storage], chosen: dict[str, str], config: ModelConfig, source: str
) -> Iterator[ShardError]:
    firsts: dict[str, str] = {}
    for name, pattern in chosen.items():
        unit = unit_of(name, config.units())
        first = firsts.setdefault(unit, name)
        if params[chosen[first]] != params[pattern]:
            yield PlanError(
                f"unit {unit or '(root)'!r} has two storages: {first} is {params[chosen[first]]}, "
                f"{name} is {params[pattern]}",
                where=Place(source, "params").of(pattern),
                notes=["fix: write the pattern so that it takes whole units"],
            )
            return


def unit_storages(
    params: Mapping[str, Storage], mesh: MeshShape, config: ModelConfig
) -> dict[str, Storage]:
    """How the parameters of each unit are stored, every axis of the mesh named.

    Args:
      params: a plan's, without faults.
      mesh: the ranks.
      config: the model's config.
    Returns: one storage a unit, children before parents; a unit without parameters, as a root may
      be, has the one of the last pattern.
    """
    names = config.parameter_shapes()
    units = config.units()
    chosen = storage_patterns(params, names)
    first = {unit_of(name, units): chosen[name] for name in reversed(list(names))}
    last = list(params)[-1]
    return {unit: params[first.get(unit, last)].on(mesh) for unit in units}
