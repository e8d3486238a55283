"""Checks a spec against a mesh and sizes, and binds its dims; every fault is pointed at."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NoReturn, cast

import numpy as np

from vlshard.language.cut import Cut
from vlshard.language.dims import BoundDim, Packed, Plain
from vlshard.language.errors import LayoutError, Span, nearest
from vlshard.language.fused import Factor, Fused
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.language.syntax import (
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
    splits_in,
)

Size = int | Packing
LARGEST = 2**62


@dataclass(frozen=True)
class Binder:
    """A spec on its way to become a layout."""

    spec: Spec
    mesh: MeshShape
    where: str | None

    def fail(self, headline: str, *spans: Span, notes: Sequence[str] = ()) -> NoReturn:
        """Raise an error that shows the spec with carets under the spans."""
        raise LayoutError(headline, text=self.spec.text, spans=spans, where=self.where, notes=notes)

    def bind(self, sizes: dict[str, Size]) -> tuple[BoundDim, ...]:
        """Check everything and bind each dim."""
        self.check_axes()
        self.check_sizes(sizes)
        bound = tuple(self.dim(dim, sizes) for dim in self.spec.dims)
        total = 1
        for dim, whole in zip(self.spec.dims, bound, strict=True):
            if (size := whole.size) > LARGEST:
                headline = f"dim '{label(dim)}' has {_shown(size)} indices, more than 2**62"
                self.fail(headline, dim.span)
            total *= size
        if total > LARGEST:
            spans = [dim.span for dim in self.spec.dims]
            self.fail(f"the tensor has {_shown(total)} elements, more than 2**62", *spans)
        return bound

    def size(self, name: str, value: object) -> Size:
        """A size as it may be used: a Packing or a plain integer, numpy's too, of at least 0."""
        value = int(cast("int", value)) if isinstance(value, np.integer) else value
        spans = [n.name_span for dim in self.spec.dims for n in names_in(dim) if n.name == name]
        if isinstance(value, Packing):
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"size {name}={value!r} is no integer and no Packing", *spans)
        if value < 0:
            self.fail(f"size {name}={value} is negative", *spans)
        return value

    def check_axes(self) -> None:
        """Every axis and every part of one is on the mesh."""
        for axis in self.spec.axes:
            if str(axis) in self.mesh.parts_of:
                continue
            span, notes = axis.span, [self.mesh.offer(str(axis))]
            if axis.name not in self.mesh.sizes:
                span = Span(axis.span.start, axis.span.start + len(axis.name))
            elif axis.part and (offer := nearest(axis.part, ORDERS).replace("'", "'.", 1)):
                notes.append(f"'.{axis.part}' is no order{offer}")
            self.fail(self.mesh.unknown(str(axis)), span, notes=notes)

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
        if packing and packing.lengths.count(1) < len(packing.lengths):
            self.fail(
                f"the Packing of plain dim '{dim.name}' must have segments of one row each",
                dim.name_span,
                notes=[f"a packed dim is a bracket: '({dim.name} s)'"],
            )
        self.check_home(dim, packing, "row")
        rows = size if isinstance(size, int) else size.rows
        return Plain(rows, self.cuts(dim.splits), packing)

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
        self.check_home(segments, packing, "segment")
        cuts = (self.cuts(splits) for splits in (segments.splits, rows.splits, dim.splits))
        return Packed(packing, *cuts)

    def fused(self, dim: Group, sizes: Mapping[str, Size]) -> Fused:
        """Bind a dim made of several."""
        for name in names_in(dim):
            if isinstance(sizes[name.name], Packing):
                headline = f"a Packing goes with the first name of a bracket, not '{name.name}'"
                self.fail(headline, name.name_span)
        if isinstance(first := dim.items[0], Name):
            self.check_home(first, None, "segment")
        for split in (split for item in dim.items for split in splits_in(item)):
            if split.order:
                give = "give " + ", ".join(
                    f"{n.name}=Packing(lengths)" for n in [*names_in(dim)][:1]
                )
                headline = f"'.{split.order}' is for packed dims, and '{label(dim)}' is fused"
                self.fail(headline, split.order_span, notes=[give])
        return Fused(tuple(self.factor(item, sizes) for item in dim.items), self.cuts(dim.splits))

    def factor(self, item: Item, sizes: Mapping[str, Size]) -> Factor:
        """Bind one of the dims of a fused one, which is dealt whole."""
        if isinstance(item, Int):
            return Factor(item.value)
        inner = (
            tuple(self.factor(part, sizes) for part in item.items)
            if isinstance(item, Group)
            else ()
        )
        size = sizes[item.name] if isinstance(item, Name) else prod(part.size for part in inner)
        extent = size if isinstance(size, int) else size.rows
        cuts = self.cuts(item.splits)
        ranks = prod(cut.ranks for cut in cuts)
        if extent % ranks:
            axes = " ".join(
                f"{str(split)[1:]}={cut.ranks}"
                for split, cut in zip(item.splits, cuts, strict=True)
            )
            works = ", ".join(str(n) for n in range(1, min(extent, 64) + 1) if extent % n == 0)
            headline = f"{label(item)}={extent} cannot be dealt whole to {axes}"
            self.fail(headline, item.span, notes=[f"fix: degrees {works} work"])
        return Factor(extent, cuts, inner)

    def check_home(self, dim: Name, packing: Packing | None, kind: str) -> None:
        """Where rows or segments stay at home, the Packing says where that is."""
        for split in dim.splits:
            if split.order != "home":
                continue
            (cut,) = self.cuts([split])
            if packing is None or packing.home is None:
                lengths = "[1] * rows" if kind == "row" else "lengths"
                give = f"give {dim.name}=Packing({lengths}, home=[...])"
                headline = f"'.home' needs to know who holds each {kind} of '{dim.name}'"
                self.fail(headline, split.order_span, notes=[give])
            homes = packing.homes or cut.ranks
            if homes % cut.ranks:
                headline = (
                    f"homes={homes} of '{dim.name}' is no multiple of the {cut.ranks} ranks here"
                )
                self.fail(headline, split.span, notes=[self.mesh.note])
            if max(packing.home, default=0) >= homes:
                i = next(i for i, home in enumerate(packing.home) if home >= homes)
                headline = f"{kind} {i} of '{dim.name}' has home {packing.home[i]}, out of range"
                self.fail(headline, split.span, notes=[self.mesh.note])

    def cuts(self, splits: Sequence[Split]) -> tuple[Cut, ...]:
        """Splits over the parts of their axes."""
        return tuple(self._cuts(splits))

    def _cuts(self, splits: Sequence[Split]) -> Iterator[Cut]:
        for split in splits:
            parts = tuple(part for axis in split.axes for part in self.mesh.axis_parts(axis))
            yield Cut(parts, tuple(self.mesh.parts[part] for part in parts), split.order)


def _shown(number: int) -> str:
    """A number that may have any number of digits."""
    return str(number) if number < 10**30 else f"about 2**{number.bit_length() - 1}"


def packing_of(dim: Dim, sizes: Mapping[str, Size]) -> Packing | None:
    """The Packing of a bracket's first name, if it has one."""
    if isinstance(dim, Group) and isinstance(dim.items[0], Name):
        size = sizes.get(dim.items[0].name)
        return size if isinstance(size, Packing) else None
    return None
