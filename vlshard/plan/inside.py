"""What a block computes on dims of its own, so that a plan may cut it there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Inside:
    """A kind of place inside blocks, between ``at.enter`` and ``at.leave``, with inner dims.

    Attributes:
      site: whose tokens it computes on: ``vision`` or ``text``.
      dims: the inner dims that a plan's ``splits`` cut, under the names that it uses there, such as
        ``{"text.q": "h d", "text.k": "kv d"}``. Attention has its query heads first, then, if they
        are cut for themselves, its key heads.
      sizes: of the inner dims, and of the width of the tokens.
      parameters: the dims of each parameter that follows, such as ``(3 h d) c``; a dim is cut as
        the inner dim of that name is.
    """

    site: str
    dims: Mapping[str, str]
    sizes: Mapping[str, int]
    parameters: Mapping[str, str]


@runtime_checkable
class HasInsides(Protocol):
    """A model's config that says what is inside its blocks."""

    def insides(self) -> Mapping[str, Inside]:
        """The insides by the names by which cores enter and leave them."""
        ...
