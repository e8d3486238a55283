"""Global sizes as annotations tell them: outright by whole dims, in part by split ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import no_type_check

from vlshard.language import Cut, Places, Plain
from vlshard.typed.call_scope import call_scope

Next = Callable[[int], int | None]


@dataclass(frozen=True)
class Claim:
    """A split dim that came to so many rows on this rank, and so admits some global sizes only.

    Attributes:
      dim: how it is cut; its own size does not matter.
      times: ranks that the cuts inside a fused dim deal equal blocks to, before ``dim`` cuts.
      places: where this rank is.
      rows: what it came to.
      source: where it stands, such as ``s@cp in 'x'``.
    """

    dim: Plain
    times: int
    places: Places
    rows: int
    source: str

    def local(self, size: int) -> int | None:
        """Rows on this rank if the global size is this; None if it cannot be dealt."""
        if size % self.times:
            return None
        return replace(self.dim, size=size // self.times).pieces(self.places).rows

    @property
    def even(self) -> int:
        """The global size if every rank has as many rows."""
        return self.rows * self.times * prod(cut.ranks for cut in self.dim.cuts)

    def next(self, size: int) -> int | None:
        """The least global size, this one or above, that is admitted; None if there is none."""
        found = _next_cut(self.dim.cuts, self.places, self.rows, -(-size // self.times))
        return None if found is None else found * self.times


def find_size(claims: Sequence[Claim]) -> int | None:
    """A global size that fits all claims: an even one, else the least; None if there is none."""
    for claim in claims:
        if all(other.local(claim.even) == other.rows for other in claims):
            return claim.even
    size = 0
    while True:
        above = [claim.next(size) for claim in claims]
        known = [least for least in above if least is not None]
        if len(known) < len(above) or max(known) == size:
            return size if len(known) == len(above) else None
        size = max(known)


def _next_cut(cuts: Sequence[Cut], places: Places, rows: int, size: int) -> int | None:
    """The least size from which these cuts, in order, leave so many rows; not below ``size``."""
    if not cuts:
        return rows if size <= rows else None
    (cut, *inner), place = cuts, cuts[0].place(places)

    def after(part: int) -> int | None:
        return _next_cut(inner, places, rows, part)

    if cut.order == "zigzag":
        return _next_zigzag(cut.ranks, place, size, after)
    return _next_chunk(cut.ranks, place, size, after)


def _next_zigzag(ranks: int, place: int, size: int, after: Next) -> int | None:
    """``_next_cut`` of head and tail chunks: what a rank has grows by one row at a time."""
    chunks = 2 * ranks
    least, extra = divmod(size, chunks)
    part = 2 * least + (place < extra) + (chunks - 1 - place < extra)
    wanted = after(part)
    if wanted is None or wanted == part:
        return None if wanted is None else size
    half, odd = divmod(wanted, 2)
    return chunks * half + place + 1 if odd else chunks * (half - 1) + chunks - place


def _next_chunk(ranks: int, place: int, size: int, after: Next) -> int | None:
    """``_next_cut`` of contiguous blocks, as ``torch.chunk`` cuts.

    Sizes with equal blocks follow each other. Among them what a rank has grows by one row at a
    time, up to a block; from the first of them it is least, and that grows with the blocks.
    """
    block = -(-size // ranks)
    while True:
        part = min(max(size - place * block, 0), block)
        wanted = after(part)
        if wanted is not None and wanted <= block:
            return size if wanted == part else place * block + wanted
        first = ranks * block + 1
        least = after(min(max(first - place * (block + 1), 0), block + 1))
        if least is None:
            return None
        block = max(block + 1, least)
        size = ranks * (block - 1) + 1


class Extent(int):
    """A global size in the scope of a call: an integer that says where it is from.

    An open one is known only by its claims; as an integer it is one size that fits them. It
    equals every size that they admit, and from the first such comparison on the name is bound
    to that size, so that jaxtyping's own annotations settle it too.
    """

    name: str
    source: str
    claims: tuple[Claim, ...]

    def __new__(cls, size: int, name: str, source: str, claims: tuple[Claim, ...] = ()) -> "Extent":
        """Say from where a size is, and what is known of it if that is not all."""
        self = super().__new__(cls, size)
        self.name, self.source, self.claims = name, source, claims
        return self

    def admits(self, size: int) -> bool:
        """Whether this may be the global size."""
        if self.claims:
            return all(claim.local(size) == claim.rows for claim in self.claims)
        return int(self) == size

    @no_type_check
    def __eq__(self, other: object) -> bool:
        if not self.claims or not isinstance(other, int):
            return int(self) == other
        if not self.admits(other):
            return False
        call_scope().sizes[self.name] = Extent(other, self.name, "a whole dim")
        return True

    @no_type_check
    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __str__(self) -> str:
        if self.claims:
            return f"{int(self)} if even ({', '.join(claim.source for claim in self.claims)})"
        return f"{int(self)} ({self.source})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
