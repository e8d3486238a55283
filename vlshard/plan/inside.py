"""What a model computes on dims of its own, so that a plan may cut it there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from vlshard.language import Group, Int, spec
from vlshard.storage import FusedDims, WrittenOut


@dataclass(frozen=True)
class Inside:
    """A kind of place inside the model with dims of its own, which a plan may cut.

    Most are inside blocks, between ``at.enter`` and ``at.leave``: each rank computes its part of
    the inner dims for all tokens of its group. Into others rows travel by index: a token's row to
    where its id, its label or its experts are. These are legal beside any cut of the tokens.

    Attributes:
      site: whose tokens it computes on: ``vision`` or ``text``.
      dims: the inner dims that a plan's ``splits`` cut, under the names that it uses there, such as
        ``{"text.q": "h d", "text.k": "kv d"}``. Attention, called ``vision.attention`` or
        ``text.attention``, has its query heads first, then, if they are cut for themselves, its
        key heads.
      sizes: of the inner dims, and of the width of the tokens.
      parameters: the dims of each parameter that follows, such as ``(3 h d) c``; a dim is cut as
        the inner dim of that name is.
      dealt: inner dims that must divide by the ranks over which they are cut, and what each is a
        number of, such as ``{"h": "heads"}``.
      whole: inner dims that are never cut, and what each is, such as
        ``{"d": "the width of a head"}``.
      by_index: whether rows travel into it by index, not all tokens of a group by doors.
    """

    site: str
    dims: Mapping[str, str]
    sizes: Mapping[str, int]
    parameters: Mapping[str, str]
    dealt: Mapping[str, str] = field(default_factory=dict[str, str])
    whole: Mapping[str, str] = field(default_factory=dict[str, str])
    by_index: bool = False


@runtime_checkable
class HasInsides(Protocol):
    """A model's config that says what is inside the model."""

    def insides(self) -> Mapping[str, Inside]:
        """The insides by the names by which cores call them."""
        ...


def fused_parameters(config: object) -> FusedDims:
    """The parameters with a dim that begins with a factor written out, such as ``(3 h d) c``."""
    insides: Mapping[str, Inside] = config.insides() if isinstance(config, HasInsides) else {}
    return {
        name: WrittenOut(i, dim.items[0].value)
        for inside in insides.values()
        for name, dims in inside.parameters.items()
        for i, dim in enumerate(spec(dims).dims)
        if isinstance(dim, Group) and isinstance(dim.items[0], Int)
    }
