"""What a plan says besides layouts: how parameters are stored and how attention is met."""

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


@dataclass(frozen=True)
class Storage:
    """Mesh axes over which a parameter is sharded, and those over which it is copied.

    Attributes:
      shard: axes that cut dim 0, major to minor; empty = a full copy on every rank.
      replicate: axes named as copies; axes named nowhere are copies too.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.shard:
            return "replicate()"
        more = f", replicate={' '.join(self.replicate)!r}" if self.replicate else ""
        return f"fsdp({' '.join(self.shard)!r}{more})"


def fsdp(shard: str, *, replicate: str = "") -> Storage:
    """Store parameters in shards; gather each unit just before it computes.

    Args:
      shard: mesh axes to shard over, for example ``"dp cp"``.
      replicate: mesh axes to copy over; axes not named are copies as well.
    """
    return Storage(tuple(shard.split()), tuple(replicate.split()))


def replicate() -> Storage:
    """Store a full copy on every rank; gradients are summed over all ranks."""
    return Storage(())


@dataclass(frozen=True)
class Ulysses:
    """All-to-all from tokens to heads over one axis, and back."""

    axis: str
    overlap: bool = False


@dataclass(frozen=True)
class Gather:
    """Queries stay; each rank fetches the key and value rows that its queries see."""

    axis: str
    overlap: bool = False


@dataclass(frozen=True)
class Ring:
    """Keys and values rotate over one axis."""

    axis: str
    overlap: bool = False


@dataclass(frozen=True)
class Hybrid:
    """All-to-all over an inner axis, gather or ring over an outer one."""

    ulysses: str
    gather: str | None = None
    ring: str | None = None
    overlap: bool = False


Mode = Ulysses | Gather | Ring | Hybrid


def ulysses(axis: str, *, overlap: bool = False) -> Ulysses:
    """Meet attention by all-to-all: tokens cut over ``axis`` become heads cut over it."""
    return Ulysses(axis, overlap)


def gather(axis: str, *, overlap: bool = False) -> Gather:
    """Meet attention by fetching keys and values over ``axis``."""
    return Gather(axis, overlap)


def ring(axis: str, *, overlap: bool = False) -> Ring:
    """Meet attention by rotating keys and values over ``axis``."""
    return Ring(axis, overlap)


def hybrid(
    *, ulysses: str, gather: str | None = None, ring: str | None = None, overlap: bool = False
) -> Hybrid:
    """Meet attention by all-to-all over one axis and gather or ring over another."""
    return Hybrid(ulysses, gather, ring, overlap)
