"""Named axes over ranks: sizes only, enough to parse, bind, plan and explain without devices."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from types import MappingProxyType

from vlshard.errors import PlanError, nearest


class MeshShape:
    """A grid of ranks with named axes, the outermost (slowest) first.

    Frozen; meshes compare and hash by their axes, sizes and order alone.
    """

    _items: tuple[tuple[str, int], ...]
    _sizes: Mapping[str, int]

    def __init__(self, **sizes: int) -> None:
        """Name the axes.

        Args:
          sizes: number of ranks along each axis, outermost first.
        Raises: PlanError if a size is no integer or below 1.
        """
        for axis, size in sizes.items():
            check_size(axis, size)
        object.__setattr__(self, "_items", tuple(sizes.items()))
        object.__setattr__(self, "_sizes", MappingProxyType(dict(sizes)))

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of ranks along each axis, outermost first."""
        return self._sizes

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self._items)

    def span(self, axes: Sequence[str]) -> int:
        """Number of ranks that the axes have together.

        Raises: PlanError if an axis is unknown.
        """
        self.check(axes)
        return prod(self.sizes[axis] for axis in axes)

    def coords(self, rank: int) -> dict[str, int]:
        """Place of a global rank along each axis.

        Raises: PlanError if the mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise PlanError(
                f"rank {rank} is not on the mesh of {self.size} ranks", notes=[self.note]
            )
        places: dict[str, int] = {}
        for axis, size in reversed(self._items):
            rank, places[axis] = divmod(rank, size)
        return {axis: places[axis] for axis, _ in self._items}

    def rank_at(self, coords: Mapping[str, int]) -> int:
        """Global rank at a place; axes that are not named count as 0.

        Raises: PlanError if an axis is unknown or a coordinate is beyond its size.
        """
        self.check(tuple(coords))
        rank = 0
        for axis, size in self._items:
            place = coords.get(axis, 0)
            if not 0 <= place < size:
                raise PlanError(f"there is no {axis}={place}", notes=[self.note])
            rank = rank * size + place
        return rank

    def peers(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """Global ranks that differ from ``rank`` along the given axes only, itself included.

        Args:
          axes: major to minor; the order of the result.
          rank: a global rank.
        Returns: as many ranks as the axes have together.
        Raises: PlanError if an axis is unknown or named twice.
        """
        self.check(axes)
        base = self.coords(rank)
        places = product(*(range(self.sizes[axis]) for axis in axes))
        return tuple(
            self.rank_at({**base, **dict(zip(axes, place, strict=True))}) for place in places
        )

    def check(self, axes: Sequence[str]) -> None:
        """Refuse axes that are unknown or named twice."""
        for axis in axes:
            if axis not in self.sizes:
                note = self.note + nearest(axis, self.sizes)
                raise PlanError(f"unknown mesh axis '{axis}'", notes=[note])
        if len(set(axes)) < len(axes):
            raise PlanError(f"a mesh axis is named twice: {' '.join(axes)}", notes=[self.note])

    @property
    def note(self) -> str:
        """The mesh as a line of a message."""
        return f"mesh: {self or 'no axes'}"

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self._items)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{a}={n}' for a, n in self._items)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshShape) and self._items == other._items

    def __hash__(self) -> int:
        return hash(self._items)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a mesh is frozen: cannot set '{name}'")


def check_size(axis: str, size: object) -> None:
    """Refuse a size that is no positive integer."""
    if isinstance(size, tuple | dict):
        raise PlanError(f"mesh axis {axis}={size!r}: split axes are not available yet")
    if not isinstance(size, int) or isinstance(size, bool):
        raise PlanError(f"mesh axis {axis}={size!r}: a size is an integer")
    if size < 1:
        raise PlanError(f"mesh axis {axis}={size}: a size is at least 1")
