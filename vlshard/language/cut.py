"""One split bound to a mesh, and places on a mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

Places = Mapping[str, int]


@dataclass(frozen=True)
class Cut:
    """One split bound to a mesh.

    Attributes:
      axes: the parts of the mesh that are joined, major to minor.
      sizes: ranks along each of them.
      order: None for contiguous blocks.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    order: str | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks that it deals to."""
        return prod(self.sizes)

    def place(self, places: Places) -> int:
        """Which of its ranks is at a place of the mesh."""
        place = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            place = place * size + places[axis]
        return place

    def spread(self, place: int) -> dict[str, int]:
        """Where one of its ranks is along each axis: the inverse of ``place``."""
        found: dict[str, int] = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            place, found[axis] = divmod(place, size)
        return found


def axes_of(cuts: Sequence[Cut]) -> tuple[str, ...]:
    """The parts of the mesh that cuts deal over, in the order of application."""
    return tuple(axis for cut in cuts for axis in cut.axes)
