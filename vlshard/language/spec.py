"""The spec language: one line of text says where a tensor lives.

The grammar (one rule a line):

spec  := dim* ["+" axes+]                 "+ tp" = a sum over tp is still pending
dim   := item | "..." | INT
item  := NAME split* | "(" (item | INT)+ ")" split*
split := "@" axes ["." order]
axes  := AXIS | "(" AXIS+ ")"             several axes joined, major to minor
AXIS  := NAME ["." PART]                  a part may not be named like an order
order := "zigzag" | "balance" | "home"    none: contiguous blocks
arrow := spec "->" spec                   the same dims in the same order
"""

from dataclasses import replace
from functools import lru_cache

from vlshard.language.errors import SpecError, nearest
from vlshard.language.parser import Parser
from vlshard.language.syntax import (
    ORDERS,
    Axis,
    Dim,
    Dots,
    Group,
    Int,
    Item,
    Name,
    Spec,
    Split,
    label,
    names_in,
    splits_in,
)

__all__ = [
    "NO_NEW_SUM",
    "ORDERS",
    "Axis",
    "Dim",
    "Dots",
    "Group",
    "Int",
    "Item",
    "Name",
    "Spec",
    "Split",
    "arrow",
    "label",
    "names_in",
    "spec",
    "spec_within",
    "splits_in",
]


NO_NEW_SUM = "a sum can be carried out on the way, but not begun"


@lru_cache(maxsize=4096)
def spec(text: str) -> Spec:
    """Read a spec.

    Args:
      text: such as ``b@dp s@cp.zigzag m + tp``; the empty text is the spec of a single number.
    Returns: the frozen tree, whose ``str`` is the canonical text.
    Raises: SpecError if the text breaks the grammar, names an axis or a dim twice, or gives an
      order to a dim that cannot have it.
    """
    parser = Parser(text)
    result = parser.spec()
    if parser.peek().text:
        parser.fail(f"unexpected '{parser.peek().text}'", parser.peek().span)
    return result


@lru_cache(maxsize=4096)
def arrow(text: str) -> tuple[Spec, Spec]:
    """Read an arrow: two layouts of one tensor.

    Args:
      text: such as ``b s@cp h d -> b s h@cp d``.
    Returns: source and destination; the spans of both count in the whole text.
    Raises: SpecError if a side is no spec, if the dims differ, or if a sum is pending on the
      right but not on the left.
    """
    parser = Parser(text)
    left, *rights = text.split("->")
    if not rights:
        parser.spec()
        parser.fail("an arrow needs a spec on each side of one '->'", parser.here())
    # Sides recur in many arrows: each is read, and kept, behind as many blanks as stand before it.
    src = spec_within(left, text)
    dst = spec_within(" " * (len(left) + 2) + "->".join(rights), text)
    if list(map(label, src.dims)) != list(map(label, dst.dims)):
        sides = (src.dims, dst.dims)
        left = {label(dim) for dim in src.dims}
        right = {label(dim) for dim in dst.dims}
        spans = [d.span for d in src.dims if label(d) not in right]
        spans += [d.span for d in dst.dims if label(d) not in left]
        if not spans:  # in another order, or a size more often on one side
            common = min(map(len, sides))
            spans = [d.span for s, d in zip(*sides, strict=False) if label(s) != label(d)]
            spans += [dim.span for side in sides for dim in side[common:]]
        parser.fail(
            "the dims of both sides must be the same, in the same order",
            *spans,
            note=_other_dims(src, dst),
        )
    # Whether parts of an axis are pending that the whole is not is seen once the mesh is known.
    known = {axis.name for axis in src.pending}
    if missing := [axis for axis in dst.pending if axis.name not in known]:
        names = " ".join(map(str, missing))
        spans = [axis.span for axis in missing]
        parser.fail(
            f"a sum over {names} is pending on the right but not on the left",
            *spans,
            note=NO_NEW_SUM,
        )
    return src, dst


def spec_within(padded: str, text: str) -> Spec:
    """Read a spec that is part of a text, which its spans count in and its messages show.

    Args:
      padded: the spec behind as many blanks as there are characters before it.
      text: the whole text.
    Raises: SpecError as ``spec`` does.
    """
    try:
        return replace(spec(padded), text=text)
    except SpecError as error:
        notes = error.notes
        raise SpecError(error.headline, text=text, spans=error.spans, notes=notes) from None


def _other_dims(src: Spec, dst: Spec) -> str:
    """What to do about other dims: mend a name, or leave reshaping to einops, with the call."""
    for name in dst.names:
        if name not in src.names and (offer := nearest(name, src.names)):
            return f"'{name}' is not on the left{offer}"
    sizes = [sorted(dim.value for dim in side.dims if isinstance(dim, Int)) for side in (src, dst)]
    if sorted(src.names) != sorted(dst.names) or sizes[0] != sizes[1]:
        return "only the layout changes here; einops.rearrange reorders and reshapes"
    left, right = (" ".join(map(label, side.dims)) for side in (src, dst))
    call = f"einops.rearrange(x, '{left} -> {right}')"
    return f"only the layout changes here; {call} does this, before or after"
