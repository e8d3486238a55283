"""Tokens as rows of samples or as a pack of them: which token of which sample lies where."""

from collections.abc import Collection

import numpy as np

from vlshard.language import (
    Group,
    IntArray,
    Layout,
    LayoutError,
    MeshShape,
    Name,
    Packed,
    Span,
    Spec,
    Split,
    label,
    spec,
)

ROWS = "b s m"
PACK = "(smp s) m"


def is_packed(tokens: Spec) -> bool:
    """Whether samples lie one after another, not each in a padded row."""
    return isinstance(tokens.dims[0], Group)


def pack_tokens(
    text: str, mesh: MeshShape, undone: Collection[str] = (), *, where: str | None = None
) -> str:
    """The layout of a pack of samples that is split as a layout of rows is.

    Args:
      text: layout of tokens, such as ``b@dp.home s@cp.zigzag m``.
      mesh: the ranks.
      undone: parts of the mesh whose cuts, where they are the last ones, are undone on the way into
        blocks: they cut the pack then, not each sample.
      where: the place that messages name.
    Returns: the same splits in a pack, such as ``(smp@dp.home s@cp.zigzag) m``; a layout that is
      packed already is given back.
    Raises: SpecError if the text is no spec; LayoutError if it is no layout of tokens.
    """
    tokens = spec(text)
    dims = " ".join(map(label, tokens.dims))
    if dims == PACK:
        return text
    match tokens.dims:
        case [Name(splits=whole), Name(splits=inner), width] if dims == ROWS and not tokens.pending:
            last = len(inner)
            while last and _is_over(inner[last - 1], undone, mesh):
                last -= 1
            parts = whole, inner[:last], inner[last:]
            samples, rows, pack = ("".join(map(str, splits)) for splits in parts)
            return f"(smp{samples} s{rows}){pack} {width}"
        case _:
            headline = f"only a layout of {ROWS!r} can be packed"
            raise LayoutError(headline, text=text, spans=[Span(0, len(text))], where=where)


def _is_over(split: Split, undone: Collection[str], mesh: MeshShape) -> bool:
    """Whether a split is over some parts of the mesh only."""
    parts = [part for axis in split.axes for part in mesh.parts_of.get(str(axis), (str(axis),))]
    return all(part in undone for part in parts)


def token_places(tokens: Layout, rank: int) -> tuple[IntArray, IntArray]:
    """Which tokens a rank holds, in local order.

    Args:
      tokens: layout of rows or of a pack.
      rank: a global rank.
    Returns: the sample of each token and its position in it, both [b, s]; a pack is one row.
    """
    held = tokens.indices(rank)[:-1]
    pack = tokens.bound[0]
    if isinstance(pack, Packed):
        lengths, ends = pack.packing.lengths_array, pack.packing.ends
        samples = np.searchsorted(ends, held[0], side="right")
        positions = held[0] - (ends - lengths)[samples]
        return samples[None], positions[None]
    samples, positions = np.meshgrid(*held, indexing="ij")
    return samples, positions


def token_holders(tokens: Layout, samples: IntArray, positions: IntArray) -> dict[str, IntArray]:
    """Where along each axis that cuts tokens the rank is that holds each of some tokens.

    Args:
      tokens: layout of rows or of a pack.
      samples: the sample of each token.
      positions: its position in that sample.
    """
    pack = tokens.bound[0]
    if isinstance(pack, Packed):
        lengths, ends = pack.packing.lengths_array, pack.packing.ends
        return tokens.holders((ends - lengths)[samples] + positions)
    return {**tokens.holders(samples, dim=0), **tokens.holders(positions, dim=1)}
