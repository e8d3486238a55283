"""Specs bound to a mesh and to sizes: who holds which indices of a tensor, in which order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import index as as_index
from types import MappingProxyType
from typing import Literal, NoReturn, SupportsIndex

import numpy as np

from vlshard.language.arrays import IntArray
from vlshard.language.binding import Binder, Size
from vlshard.language.census import by_rank, costs, counts
from vlshard.language.dims import BoundDim, FloatArray, Packed
from vlshard.language.errors import LayoutError
from vlshard.language.inverse import holders
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.language.pieces import Pieces
from vlshard.language.spec import spec
from vlshard.language.syntax import Spec, label

__all__ = ["Binder", "Layout", "Size", "layout", "refuse_shape"]


@dataclass(frozen=True)
class Layout:
    """Where each part of one tensor lives.

    Attributes:
      spec: the layout as written.
      mesh: the axes and their sizes.
      bound: each dim with its size and cuts.
      items: the sizes that were given, by name.
      where: the place that messages about this layout name, or None.
    """

    spec: Spec
    mesh: MeshShape
    bound: tuple[BoundDim, ...]
    items: tuple[tuple[str, Size], ...]
    where: str | None = field(default=None, compare=False)

    @property
    def sizes(self) -> Mapping[str, Size]:
        """The sizes that were given."""
        return MappingProxyType(dict(self.items))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the whole tensor."""
        return tuple(dim.size for dim in self.bound)

    @property
    def axes(self) -> tuple[str, ...]:
        """Parts of the mesh that the spec uses: of splits as they apply, then pending ones."""
        return tuple(part for axis in self.spec.axes for part in self.mesh.axis_parts(axis))

    def indices(self, rank: int) -> tuple[IntArray, ...]:
        """Global indices that a rank holds, in local order.

        Args:
          rank: a global rank.
        Returns: one fresh int64 array per tensor dim; the rank holds their outer product.
        Raises: PlanError if the mesh has no such rank.
        """
        return tuple(pieces.indices() for pieces in self.pieces(rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Sizes of the part that a rank holds.

        Args:
          rank: a global rank.
        Raises: PlanError if the mesh has no such rank.
        """
        places = self.mesh.coords(rank)
        return tuple(dim.count(places) for dim in self.bound)

    def pieces(self, rank: int) -> tuple[Pieces, ...]:
        """What a rank holds of each dim, as runs of consecutive indices."""
        places = self.mesh.coords(rank)
        return tuple(dim.pieces(places) for dim in self.bound)

    def owners(self, index: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
        """The ranks that hold an element.

        Args:
          index: its global index along each dim; of a tensor of one dim, the integer alone.
        Returns: global ranks, increasing; several where the layout is whole over an axis.
        Raises: LayoutError if the tensor has no such element.
        """
        single = isinstance(index, SupportsIndex)
        at = (as_index(index),) if single else tuple(map(as_index, index))
        inside = (0 <= i < dim.size for i, dim in zip(at, self.bound, strict=False))
        if len(at) != len(self.bound) or not all(inside):
            headline = f"a tensor of shape {self.shape} has no element {at}"
            raise LayoutError(headline, text=self.spec.text, where=self.where)
        places: dict[str, int] = {}
        for i, dim in zip(at, self.bound, strict=True):
            found = holders(dim, np.array([i]))
            places |= {axis: int(place[0]) for axis, place in found.items()}
        rest = [part for part in self.mesh.parts if part not in places]
        return tuple(sorted(self.mesh.peers(rest, self.mesh.rank_at(places))))

    def holders(self, rows: IntArray, dim: int = 0) -> dict[str, IntArray]:
        """Where along each axis that cuts a dim the rank is that holds each of some rows.

        Args:
          rows: indices along the dim, in any order; all of them are there.
          dim: which dim.
        Returns: by part of the mesh, one place a row. Along other parts all ranks hold them.
        """
        return holders(self.bound[dim], rows)

    def loads(self, dim: int = 0, *, by: Literal["rows", "cost"] = "rows") -> FloatArray:
        """How much of a dim each rank holds.

        Args:
          dim: which dim.
          by: ``rows``, or ``cost``: each row of a segment of n rows costs ``a * n + b`` by the
            coefficients of its Packing (of dims that are not packed, 1).
        Returns: one number per rank of the mesh.
        """
        bound, ranks = self.bound[dim], self.mesh.parts
        if by == "cost" and isinstance(bound, Packed):
            return by_rank(costs(bound, ranks), ranks)
        return by_rank(counts(bound, ranks), ranks)

    def imbalance(self, dim: int = 0, *, by: Literal["rows", "cost"] = "rows") -> float:
        """The largest load of a rank over the mean load; 1 where nothing is to be done.

        Args:
          dim: which dim.
          by: as for ``loads``.
        """
        loads = self.loads(dim, by=by)
        return float(loads.max() / loads.mean()) if loads.any() else 1.0


def layout(
    text: str | Spec, mesh: MeshShape, /, *, where: str | None = None, **sizes: int | Packing
) -> Layout:
    """Bind a spec to a mesh and to the sizes of its dims.

    Args:
      text: a spec, such as ``b@dp s@cp.zigzag m`` or ``(img@dp.home s)@cp c``.
      mesh: the ranks; sizes are enough.
      where: the place that messages name, such as ``plans/long.py:41 text.q``.
      sizes: global size of each named dim. A Packing for the first name of a bracket makes it
        packed (the other name then takes none); for a plain dim, a Packing of segments of one
        row says who holds each row.
    Returns: the layout; equal arguments may give the same object.
    Raises: SpecError if the text is no spec; LayoutError if it does not fit the mesh or sizes.
    """
    parsed = spec(text) if isinstance(text, str) else text
    binder = Binder(parsed, mesh.shape, where)
    items = tuple((name, binder.size(name, value)) for name, value in sizes.items())
    return _bind(binder, parsed.text, items)


def refuse_shape(bound: Layout, rank: int, shape: tuple[int, ...]) -> NoReturn:
    """Say that a local tensor has not the shape that a layout gives its rank.

    Raises: LayoutError.
    """
    want = bound.local_shape(rank)
    dims = zip(bound.spec.dims, bound.bound, shape, want, strict=False)
    wrong = [(dim, size) for dim, size, got, expected in dims if got != expected]
    notes = [
        f"the Packing of '{label(dim)}' has {size.size} rows in all"
        for dim, size in wrong
        if isinstance(size, Packed)
    ]
    if len(notes) < len(wrong):
        notes.append("a plain dim that is not even over its axes needs its global size")
    headline = f"the tensor of rank {rank} has shape {shape}, the layout gives it {want}"
    raise LayoutError(
        headline, text=bound.spec.text, spans=[dim.span for dim, _ in wrong], notes=notes
    )


@lru_cache(maxsize=512)
def _bind(binder: Binder, _text: str, items: tuple[tuple[str, Size], ...]) -> Layout:
    """The layout of checked arguments; texts are told apart since messages show them."""
    return Layout(binder.spec, binder.mesh, binder.bind(dict(items)), items, binder.where)
