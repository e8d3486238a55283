"""How attention is met: the modes that a plan names, and the mesh axes each of them uses."""

from dataclasses import dataclass
from typing import NamedTuple


class Heads(NamedTuple):
    """Heads of an attention site.

    Attributes:
      q: query heads.
      kv: key and value heads, a divisor of the query heads.
      width: width of each.
    """

    q: int
    kv: int
    width: int


class Ways(NamedTuple):
    """Mesh axes over which a mode brings queries and keys together, each way major to minor.

    Attributes:
      ulysses: all-to-all from tokens to heads.
      gather: keys and values are fetched.
      ring: keys and values go round.
    """

    ulysses: tuple[str, ...] = ()
    gather: tuple[str, ...] = ()
    ring: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes."""
        return (*self.gather, *self.ring, *self.ulysses)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Axes of each process group that is needed: made ahead, on every rank alike."""
        return self.ulysses, self.ring, (*self.gather, *self.ulysses)


@dataclass(frozen=True)
class Ulysses:
    """All-to-all from tokens to heads over some axes, and back."""

    axis: str
    overlap: bool = False

    def __str__(self) -> str:
        return f"ulysses({self.axis!r}{_overlap(self.overlap)})"

    @property
    def ways(self) -> Ways:
        """The axes by what happens over them."""
        return Ways(ulysses=tuple(self.axis.split()))


@dataclass(frozen=True)
class Gather:
    """Queries stay; each rank fetches the key and value rows that its queries see."""

    axis: str
    overlap: bool = False

    def __str__(self) -> str:
        return f"gather({self.axis!r}{_overlap(self.overlap)})"

    @property
    def ways(self) -> Ways:
        """The axes by what happens over them."""
        return Ways(gather=tuple(self.axis.split()))


@dataclass(frozen=True)
class Ring:
    """Keys and values rotate over some axes."""

    axis: str
    overlap: bool = False

    def __str__(self) -> str:
        return f"ring({self.axis!r}{_overlap(self.overlap)})"

    @property
    def ways(self) -> Ways:
        """The axes by what happens over them."""
        return Ways(ring=tuple(self.axis.split()))


@dataclass(frozen=True)
class Hybrid:
    """All-to-all over inner axes, gather or ring over outer ones."""

    ulysses: str
    gather: str | None = None
    ring: str | None = None
    overlap: bool = False

    def __str__(self) -> str:
        outer = (("gather", self.gather), ("ring", self.ring))
        given = "".join(f", {name}={axes!r}" for name, axes in outer if axes is not None)
        return f"hybrid(ulysses={self.ulysses!r}{given}{_overlap(self.overlap)})"

    @property
    def ways(self) -> Ways:
        """The axes by what happens over them."""
        named = (self.ulysses, self.gather or "", self.ring or "")
        return Ways(*(tuple(axes.split()) for axes in named))


Mode = Ulysses | Gather | Ring | Hybrid


def _overlap(overlap: bool) -> str:
    """The setting as a plan writes it."""
    return ", overlap=True" if overlap else ""


def ulysses(axis: str, *, overlap: bool = False) -> Ulysses:
    """Meet attention by all-to-all: tokens cut over ``axis`` become heads cut over it.

    Args:
      axis: an axis (``"cp"``), a part of one (``"cp.0"``) or several (``"dp cp"``).
      overlap: let keys, values and queries travel while the next of them is projected.
    """
    return Ulysses(axis, overlap)


def gather(axis: str, *, overlap: bool = False) -> Gather:
    """Meet attention by fetching the keys and values that this rank's queries see.

    Args:
      axis: an axis (``"cp"``), a part of one (``"cp.0"``) or several (``"dp cp"``).
      overlap: let keys and values travel while the next of k, v, q is projected.
    """
    return Gather(axis, overlap)


def ring(axis: str, *, overlap: bool = False) -> Ring:
    """Meet attention by rotating keys and values; no rank ever holds those of all.

    Args:
      axis: an axis (``"cp"``), a part of one (``"cp.0"``) or several (``"dp cp"``).
      overlap: let the next block travel while one is attended to.
    """
    return Ring(axis, overlap)


def hybrid(
    *, ulysses: str, gather: str | None = None, ring: str | None = None, overlap: bool = False
) -> Hybrid:
    """Meet attention by all-to-all over some axes, and by gather or ring over others.

    Args:
      ulysses: axes from which tokens are moved to heads.
      gather: axes over which keys and values are then fetched.
      ring: axes over which they are rotated instead; exactly one of the two is given.
      overlap: let what travels do so behind what is computed.
    """
    return Hybrid(ulysses, gather, ring, overlap)
