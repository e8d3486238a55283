"""Specs bound to a mesh and to sizes: who holds which indices of a tensor, in which order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import NoReturn

from vlshard.dims import BoundDim, Cut, Fused, Packed, Plain
from vlshard.errors import LayoutError, Span, nearest
from vlshard.header import IntArray
from vlshard.mesh_shape import MeshShape
from vlshard.packing import Packing
from vlshard.pieces import Pieces
from vlshard.spec import (
    ORDERS,
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
    spec,
    splits_in,
)

Size = int | Packing
LARGEST = 2**63 - 1


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
        """Mesh axes that the spec uses: those of splits in order of application, then pending."""
        return tuple(axis.name for axis in self.spec.axes)

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
        return tuple(pieces.rows for pieces in self.pieces(rank))

    def pieces(self, rank: int) -> tuple[Pieces, ...]:
        """What a rank holds of each dim, as runs of consecutive indices."""
        places = self.mesh.coords(rank)
        return tuple(dim.pieces(places) for dim in self.bound)


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
    binder = Binder(parsed, MeshShape(**mesh.sizes), where)
    items = tuple((name, binder.size(name, value)) for name, value in sizes.items())
    return bind(binder, parsed.text, items)


@lru_cache(maxsize=512)
def bind(binder: "Binder", _text: str, items: tuple[tuple[str, Size], ...]) -> Layout:
    """The layout of checked arguments; texts are told apart since messages show them."""
    return binder.layout(dict(items))


@dataclass(frozen=True)
class Binder:
    """A spec on its way to become a layout."""

    spec: Spec
    mesh: MeshShape
    where: str | None

    def fail(self, headline: str, *spans: Span, notes: Sequence[str] = ()) -> NoReturn:
        """Raise an error that shows the spec with carets under the spans."""
        raise LayoutError(headline, text=self.spec.text, spans=spans, where=self.where, notes=notes)

    def layout(self, sizes: dict[str, Size]) -> Layout:
        """Check everything and bind each dim."""
        self.check_axes()
        self.check_available()
        self.check_sizes(sizes)
        bound = tuple(self.dim(dim, sizes) for dim in self.spec.dims)
        for dim, whole in zip(self.spec.dims, bound, strict=True):
            if whole.size > LARGEST:
                self.fail(f"dim '{label(dim)}' has {whole.size} indices, too many", dim.span)
        return Layout(self.spec, self.mesh, bound, tuple(sizes.items()), self.where)

    def size(self, name: str, value: object) -> Size:
        """A size as it may be used: a Packing or a plain integer of at least 0."""
        spans = [n.name_span for dim in self.spec.dims for n in names_in(dim) if n.name == name]
        if isinstance(value, Packing):
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"size {name}={value!r} is no integer and no Packing", *spans)
        if value < 0:
            self.fail(f"size {name}={value} is negative", *spans)
        return value

    def check_axes(self) -> None:
        """Every axis is on the mesh."""
        for axis in self.spec.axes:
            if axis.name not in self.mesh.sizes:
                note = self.mesh.note + nearest(axis.name, self.mesh.sizes)
                span = Span(axis.span.start, axis.span.start + len(axis.name))
                self.fail(f"unknown mesh axis '{axis.name}'", span, notes=[note])

    def check_available(self) -> None:
        """Refuse what the language can say but layouts cannot do."""
        for dim in self.spec.dims:
            for split in splits_in(dim):
                if split.order == "balance":
                    self.fail("'.balance' is not available yet", split.order_span)
                if len(split.axes) > 1:
                    joined = Span(split.axes[0].span.start, split.axes[-1].span.stop)
                    axes = " ".join(map(str, split.axes))
                    self.fail(f"joined axes ({axes}) are not available yet", joined)
        for axis in self.spec.axes:
            if axis.part is not None:
                offer = nearest(axis.part, ORDERS).replace("'", "'.", 1)
                notes = [f"'.{axis.part}' is no order{offer}"] if offer else []
                self.fail(f"split axes ({axis}) are not available yet", axis.span, notes=notes)

    def check_sizes(self, sizes: Mapping[str, Size]) -> None:
        """Every name has a size where it needs one, and every size has a name."""
        for name in sizes:
            if name not in self.spec.names:
                notes = [f"names: {' '.join(self.spec.names) or 'none'}"]
                notes[0] += nearest(name, self.spec.names)
                self.fail(f"size {name}= is for no dim of the spec", notes=notes)
        missing = [
            name
            for dim in self.spec.dims
            for i, name in enumerate(names_in(dim))
            if name.name not in sizes and not (i and packing_of(dim, sizes))
        ]
        if missing:
            names = ", ".join(f"'{name.name}'" for name in missing)
            notes = [f"give {', '.join(f'{name.name}=...' for name in missing)}"]
            self.fail(f"missing size of {names}", *(n.name_span for n in missing), notes=notes)

    def dim(self, dim: Dim, sizes: Mapping[str, Size]) -> BoundDim:
        """Bind one dim."""
        packing = packing_of(dim, sizes)
        match dim:
            case Int(value):
                return Plain(value)
            case Dots(span):
                self.fail("'...' has no sizes: name its dims", span)
            case Name():
                return self.plain(dim, sizes[dim.name])
            case Group() if packing:
                return self.packed(dim, packing, sizes)
            case Group():
                return self.fused(dim, sizes)

    def plain(self, dim: Name, size: Size) -> Plain:
        """Bind a dim of its own."""
        packing = size if isinstance(size, Packing) else None
        if packing and any(length != 1 for length in packing.lengths):
            self.fail(
                f"the Packing of plain dim '{dim.name}' must have segments of one row each",
                dim.name_span,
                notes=[f"a packed dim is a bracket: '({dim.name} s)'"],
            )
        self.check_home(dim, packing, "row")
        rows = size if isinstance(size, int) else size.rows
        return Plain(rows, self.cuts(dim.splits), packing.home if packing else None)

    def packed(self, dim: Group, packing: Packing, sizes: Mapping[str, Size]) -> Packed:
        """Bind a dim of segments."""
        match dim.items:
            case (Name() as segments, Name() as rows):
                pass
            case _:
                inside = Span(dim.items[0].span.start, dim.items[-1].span.stop)
                headline = "a packed dim has two names, its segments and their rows: '(img s)'"
                self.fail(headline, inside)
        if rows.name in sizes:
            headline = f"'{rows.name}' takes no size: the Packing of '{segments.name}' has them"
            self.fail(headline, rows.name_span)
        for split in rows.splits:
            if split.order:
                self.fail("'.zigzag' inside a pack is not available yet", split.order_span)
        self.check_home(segments, packing, "segment")
        cuts = (self.cuts(splits) for splits in (segments.splits, rows.splits, dim.splits))
        return Packed(packing, *cuts)

    def fused(self, dim: Group, sizes: Mapping[str, Size]) -> Fused:
        """Bind a dim made of several, of which only the first is cut."""
        first, *rest = dim.items
        inner = rest if isinstance(first, Name | Int) else dim.items
        if cuts := [split for item in inner for split in splits_in(item)]:
            headline = "inner splits of a fused dim are not available yet; only its first is cut"
            self.fail(headline, *(split.span for split in cuts))
        for name in names_in(dim):
            if isinstance(sizes[name.name], Packing):
                headline = f"a Packing goes with the first name of a bracket, not '{name.name}'"
                self.fail(headline, name.name_span)
        if isinstance(first, Name):
            self.check_home(first, None, "segment")
        outer, splits = self.extent(first, sizes), tuple(splits_in(first))
        ranks = prod(cut.ranks for cut in self.cuts(splits))
        if outer % ranks:
            axes = " ".join(f"{cut.axis}={cut.ranks}" for cut in self.cuts(splits))
            works = ", ".join(str(n) for n in range(1, min(outer, 64) + 1) if outer % n == 0)
            self.fail(
                f"{label(first)}={outer} cannot be dealt whole to {axes}",
                first.span,
                notes=[f"fix: degrees {works} work"],
            )
        total = prod(self.extent(item, sizes) for item in rest)
        return Fused(outer, total, self.cuts(splits), self.cuts(dim.splits))

    def extent(self, item: Item, sizes: Mapping[str, Size]) -> int:
        """Size of a part of a fused dim."""
        match item:
            case Int(value):
                return value
            case Name(name):
                size = sizes[name]
                return size if isinstance(size, int) else size.rows
            case Group(items):
                return prod(self.extent(inner, sizes) for inner in items)

    def check_home(self, dim: Name, packing: Packing | None, kind: str) -> None:
        """Where rows or segments stay at home, the Packing says where that is."""
        for split in dim.splits:
            if split.order != "home":
                continue
            ranks = self.mesh.sizes[split.axes[0].name]
            if packing is None or packing.home is None:
                lengths = "[1] * rows" if kind == "row" else "lengths"
                give = f"give {dim.name}=Packing({lengths}, home=[...])"
                headline = f"'.home' needs to know who holds each {kind} of '{dim.name}'"
                self.fail(headline, split.order_span, notes=[give])
            for i, home in enumerate(packing.home):
                if home >= ranks:
                    headline = f"{kind} {i} of '{dim.name}' has home {home}, out of range"
                    self.fail(headline, split.span, notes=[self.mesh.note])

    def cuts(self, splits: Sequence[Split]) -> tuple[Cut, ...]:
        """Splits with the sizes of their axes."""
        return tuple(Cut(s.axes[0].name, self.mesh.sizes[s.axes[0].name], s.order) for s in splits)


def packing_of(dim: Dim, sizes: Mapping[str, Size]) -> Packing | None:
    """The Packing of a bracket's first name, if it has one."""
    if isinstance(dim, Group) and isinstance(dim.items[0], Name):
        size = sizes.get(dim.items[0].name)
        return size if isinstance(size, Packing) else None
    return None
