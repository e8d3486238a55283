"""Global sizes as annotations tell them: outright by whole dims, in part by split ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import no_type_check

from vlshard.language import Places, Plain
from vlshard.typed.call_scope import call_scope


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

    @property
    def sizes(self) -> range:
        """All global sizes that may give this rank so many rows, and some more.

        Of s rows cut into n blocks of ceil(s / n), a rank has at most (s + n - 1) / n and, the
        last one, at least (s - (n - 1)**2) / n; head and tail chunks differ from s / n by 2.
        """
        low = high = self.rows
        for cut in reversed(self.dim.cuts):
            low = max((low - 2) * cut.ranks + 1, 0)
            high = high * cut.ranks + (cut.ranks + 1) ** 2
        return range(low * self.times, high * self.times + 1)


def find_size(claims: Sequence[Claim]) -> int | None:
    """A global size that fits all claims: an even one, else the least; None if there is none."""

    def fits(size: int) -> bool:
        return all(claim.local(size) == claim.rows for claim in claims)

    low = max(claim.sizes.start for claim in claims)
    high = min(claim.sizes.stop for claim in claims)
    sizes = (*(claim.even for claim in claims), *range(low, high))
    return next((size for size in sizes if fits(size)), None)


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
