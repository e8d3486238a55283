"""Named axes over ranks: sizes only, enough to parse, bind, plan and explain without devices."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from types import MappingProxyType
from typing import cast

import numpy as np

from vlshard.language.errors import PlanError, nearest
from vlshard.language.syntax import ORDERS, Axis

AxisSize = int | Sequence[int] | Mapping[str, int]


class MeshShape:
    """A grid of ranks with named axes, the outermost (slowest) first.

    An axis may be split into parts, outermost first: ``cp=(2, 4)`` has parts ``cp.0`` and
    ``cp.1``, ``cp=dict(ring=2, ulysses=4)`` has ``cp.ring`` and ``cp.ulysses``. The axis then means
    all its parts in order. An axis that is not split is its own only part.

    Frozen; meshes compare and hash by their axes, parts, sizes and order alone.
    """

    _items: tuple[tuple[str, int | tuple[tuple[str, int], ...]], ...]

    def __init__(self, /, **sizes: AxisSize) -> None:
        """Name the axes.

        Args:
          sizes: number of ranks along each axis, or along each of its parts, outermost first.
        Raises: PlanError if a size is no integer or below 1, or a part cannot be named so.
        """
        items = tuple((axis, _checked(axis, size)) for axis, size in sizes.items())
        object.__setattr__(self, "_items", items)

    @property
    def shape(self) -> "MeshShape":
        """The sizes alone, without process groups."""
        return self

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Number of ranks along each axis, outermost first."""
        sizes = {
            axis: size if isinstance(size, int) else prod(ranks for _, ranks in size)
            for axis, size in self._items
        }
        return MappingProxyType(sizes)

    @cached_property
    def parts(self) -> Mapping[str, int]:
        """Number of ranks along each part, outermost first; an unsplit axis is its own part."""
        parts: dict[str, int] = {}
        for axis, size in self._items:
            if isinstance(size, int):
                parts[axis] = size
            else:
                parts |= {f"{axis}.{part}": ranks for part, ranks in size}
        return MappingProxyType(parts)

    @cached_property
    def parts_of(self) -> Mapping[str, tuple[str, ...]]:
        """The parts that each axis, or part, stands for, in order."""
        whole = {
            axis: (axis,) if isinstance(size, int) else tuple(f"{axis}.{part}" for part, _ in size)
            for axis, size in self._items
        }
        return MappingProxyType({**{part: (part,) for part in self.parts}, **whole})

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.parts.values())

    def expand(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The parts that axes stand for.

        Args:
          axes: axes or parts, major to minor.
        Raises: PlanError if one is unknown, or a part is named twice.
        """
        self.check(axes)
        return tuple(part for axis in axes for part in self.parts_of[axis])

    def axis_parts(self, axis: Axis) -> tuple[str, ...]:
        """The parts that an axis of a spec stands for.

        Raises: PlanError if it is unknown.
        """
        return self.expand((str(axis),))

    def text(self, parts: Sequence[str]) -> str:
        """Parts as the language writes them: ``cp``, ``cp.0`` or, joined, ``(dp cp)``.

        Args:
          parts: major to minor.
        """
        words: list[str] = []
        left = list(parts)
        while left:
            axis = left[0].partition(".")[0]
            whole = self.parts_of[axis]
            count = len(whole) if tuple(left[: len(whole)]) == whole else 1
            words.append(axis if count == len(whole) else left[0])
            del left[:count]
        return words[0] if len(words) == 1 else f"({' '.join(words)})"

    def read(self, text: str) -> tuple[str, ...]:
        """The parts that ``text`` writes: the inverse of ``text``, for one or several axes.

        Args:
          text: axes as the language writes them: ``cp``, ``cp.0``, ``(dp cp)``.
        Raises: PlanError if one is unknown, or a part is named twice.
        """
        return self.expand(text.strip("()").split())

    def span(self, axes: Sequence[str]) -> int:
        """Number of ranks that axes or parts have together.

        Raises: PlanError if one is unknown.
        """
        return prod(self.parts[part] for part in self.expand(axes))

    def coords(self, rank: int) -> dict[str, int]:
        """Place of a global rank along each part.

        Raises: PlanError if the mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise PlanError(
                f"rank {rank} is not on the mesh of {self.size} ranks", notes=[self.note]
            )
        places: list[int] = []
        for size in reversed(list(self.parts.values())):
            rank, place = divmod(rank, size)
            places.append(place)
        return dict(zip(self.parts, reversed(places), strict=True))

    def rank_at(self, coords: Mapping[str, int]) -> int:
        """Global rank at a place; parts that are not named count as 0.

        Raises: PlanError if a part is unknown or a coordinate is beyond its size.
        """
        for part in coords:
            if part not in self.parts:
                self.check((part,))
                raise PlanError(f"axis {part} is split: give its parts", notes=[self.note])
        rank = 0
        for part, size in self.parts.items():
            place = coords.get(part, 0)
            if not 0 <= place < size:
                raise PlanError(f"there is no {part}={place}", notes=[self.note])
            rank = rank * size + place
        return rank

    def peers(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """Global ranks that differ from ``rank`` along the given axes only, itself included.

        Args:
          axes: axes or parts, major to minor; the order of the result.
          rank: a global rank.
        Returns: as many ranks as the axes have together.
        Raises: PlanError if an axis is unknown or named twice.
        """
        base, strides = self.coords(rank), self._strides
        parts = self.expand(axes)
        first = rank - sum(base[part] * strides[part] for part in parts)
        steps = (range(0, self.parts[part] * strides[part], strides[part]) for part in parts)
        return tuple(first + sum(place) for place in product(*steps))

    @cached_property
    def _strides(self) -> Mapping[str, int]:
        """How far apart ranks are that are neighbours along each part."""
        strides: dict[str, int] = {}
        stride = 1
        for part, size in reversed(list(self.parts.items())):
            strides[part] = stride
            stride *= size
        return strides

    def check(self, axes: Sequence[str]) -> None:
        """Refuse axes and parts that are unknown or named twice."""
        for axis in axes:
            if axis not in self.parts_of:
                raise PlanError(self.unknown(axis), notes=[self.offer(axis)])
        named = [part for axis in axes for part in self.parts_of[axis]]
        if len(set(named)) < len(named):
            raise PlanError(f"a mesh axis is named twice: {' '.join(axes)}", notes=[self.note])

    def unknown(self, axis: str) -> str:
        """Headline of a message about an axis or part that is not there."""
        name, _, part = axis.partition(".")
        if part and name in self.sizes:
            split = self.parts_of[name] != (name,)
            return (
                f"mesh axis '{name}' has no part '{part}'"
                if split
                else (f"mesh axis '{name}' is not split, so it has no part '{part}'")
            )
        return f"unknown mesh axis '{name}'"

    def offer(self, axis: str) -> str:
        """The mesh as a line of a message, with the names most like one that is not there."""
        name, _, part = axis.partition(".")
        if name not in self.sizes:
            return self.note + nearest(name, self.sizes)
        parts = self.parts_of[name]
        return self.note + (nearest(axis, parts) if part and parts != (name,) else "")

    @property
    def note(self) -> str:
        """The mesh as a line of a message."""
        return f"mesh: {str(self) or 'no axes'}"

    def __str__(self) -> str:
        return " ".join(f"{axis}={_size_text(size)}" for axis, size in self._items)

    def __repr__(self) -> str:
        items = ", ".join(f"{a}={n if isinstance(n, int) else _given(n)!r}" for a, n in self._items)
        return f"{type(self).__name__}({items})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshShape) and self._items == other._items

    def __hash__(self) -> int:
        return hash(self._items)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a mesh is frozen: cannot set '{name}'")


def _checked(axis: str, size: object) -> int | tuple[tuple[str, int], ...]:
    """The size of an axis, or the names and sizes of its parts."""
    if isinstance(size, Mapping):
        named = tuple(cast("Mapping[str, object]", size).items())
    elif isinstance(size, Sequence) and not isinstance(size, str):
        named = tuple((str(i), part) for i, part in enumerate(cast("Sequence[object]", size)))
    else:
        return _integer(axis, size)
    if not named:
        raise PlanError(f"mesh axis {axis}={size!r}: a split axis has at least one part")
    for part, _ in named:
        if part in ORDERS:
            raise PlanError(f"mesh axis {axis}: a part cannot be named like the order '.{part}'")
        if not (part.isidentifier() or part.isdecimal()) or not part.isascii():
            raise PlanError(f"mesh axis {axis}: a part cannot be named {part!r}")
    return tuple((part, _integer(f"{axis}.{part}", ranks)) for part, ranks in named)


def _integer(axis: str, size: object) -> int:
    """A number of ranks; numpy's integers are taken too."""
    size = int(cast("int", size)) if isinstance(size, np.integer) else size
    if not isinstance(size, int) or isinstance(size, bool):
        raise PlanError(f"mesh axis {axis}={size!r}: a size is an integer")
    if size < 1:
        raise PlanError(f"mesh axis {axis}={size}: a size is at least 1")
    return size


def _given(parts: tuple[tuple[str, int], ...]) -> tuple[int, ...] | dict[str, int]:
    """The sizes of parts as they were given."""
    numbered = [name for name, _ in parts] == [str(i) for i in range(len(parts))]
    return tuple(size for _, size in parts) if numbered else dict(parts)


def _size_text(size: int | tuple[tuple[str, int], ...]) -> str:
    """A size in a message: ``8``, ``(2, 4)`` or ``(ring=2, ulysses=4)``."""
    if isinstance(size, int):
        return str(size)
    given = _given(size)
    if isinstance(given, tuple):
        return f"({', '.join(map(str, given))})"
    return f"({', '.join(f'{name}={ranks}' for name, ranks in given.items())})"
