"""One tensor against a ``Sharded`` annotation: its dtype, sizes and, of a DTensor, placements."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlshard.comm import mesh_of
from vlshard.language import (
    BoundDim,
    Dim,
    Group,
    Int,
    LayoutError,
    MeshShape,
    Name,
    Packing,
    Plain,
    ShardError,
    Span,
    Spec,
    label,
    layout,
    names_in,
    parts_of,
    placed_text,
    placements,
    same_placements,
    splits_in,
)
from vlshard.typed.call_scope import CallScope
from vlshard.typed.mesh_in_use import MeshInUse, mesh_in_use
from vlshard.typed.sizes import Claim, Extent, find_size


@dataclass(frozen=True)
class Declared:
    """What an annotation says.

    Attributes:
      spec: the layout; its text is the annotation's.
      dtypes: the dtypes that are allowed; empty if any is.
      word: the characters of the dtype word.
    """

    spec: Spec
    dtypes: frozenset[torch.dtype]
    word: Span


class Fault(NamedTuple):
    """What does not fit, and where in the annotation it is said."""

    spans: tuple[Span, ...]
    note: str


def holds(declared: Declared, x: Tensor, scope: CallScope) -> bool:
    """Whether a tensor is as declared; if so, the sizes that it tells are bound in the call."""
    check = SizeCheck.of(declared, x, scope)
    if not check.faults:
        scope.sizes.update(check.found)
    return not check.faults


def message(declared: Declared, x: Tensor, scope: CallScope, subject: str) -> str:
    """Why a tensor is not as declared: what, where, and what is known of sizes so far."""
    check = SizeCheck.of(declared, x, scope)
    sizes = [f"{name}={_size_text(size)}" for name, size in scope.bound.items()]
    notes = [fault.note for fault in check.faults]
    if sizes:
        notes.append(f"sizes: {', '.join(sizes)}")
    if check.use:
        notes.append(f"{check.use.mesh.note}; this is rank {check.use.rank}")
    elif declared.spec.axes:
        notes.append("no mesh is in use, so each dim is whole; with use_mesh(mesh) splits count")
    spans = [span for fault in check.faults for span in fault.spans]
    headline = f"{subject} is not as declared"
    return str(LayoutError(headline, text=declared.spec.text, spans=spans, notes=notes))


def _size_text(size: int) -> str:
    """A size and from where it is."""
    return str(size) if isinstance(size, Extent) else f"{size} (another annotation)"


@dataclass
class SizeCheck:
    """A tensor's sizes against what is known of them; what they tell goes to ``found``.

    Attributes:
      spec: the layout.
      source: the tensor's name in messages.
      use: the mesh, if splits count: not for a DTensor, whose sizes are global.
      sizes: global sizes bound before, by name, or by the text of a bracket.
      found: those that this tensor tells.
      faults: what does not fit.
    """

    spec: Spec
    source: str
    use: MeshInUse | None
    whole: bool
    sizes: Mapping[str, int]
    found: dict[str, Extent] = field(default_factory=dict[str, Extent])
    faults: list[Fault] = field(default_factory=list[Fault])

    @classmethod
    def of(cls, declared: Declared, x: Tensor, scope: CallScope) -> "SizeCheck":
        """Check a tensor."""
        use = mesh_in_use()
        argument = scope.argument(x)
        source = f"'{argument}'" if argument else "another value"
        whole = use is None or isinstance(x, DTensor)
        check = cls(declared.spec, source, use, whole, scope.sizes)
        if declared.dtypes and x.dtype not in declared.dtypes:
            word = declared.spec.text[slice(*declared.word)]
            check.faults.append(Fault((declared.word,), f"the dtype is {x.dtype}, not {word}"))
        if isinstance(x, DTensor):
            check.place(x)
        check.shape(tuple(x.shape))
        return check

    def place(self, x: DTensor) -> None:
        """The placements of a DTensor are the layout's."""
        everything = Span(0, len(self.spec.text))
        try:
            parsed = self.spec.expand(x.ndim)
            mesh = mesh_of(x.device_mesh, parsed)
            want = placements(parsed, mesh, **(self.use.packings if self.use else {}))
        except ShardError as error:
            self.faults.append(Fault(error.spans or (everything,), error.headline))
            return
        if not same_placements(x.placements, want, mesh):
            placed = f"placed as {placed_text(x.placements, mesh)}"
            spans = tuple(dim.span for dim in self.spec.dims) or (everything,)
            self.faults.append(Fault(spans, f"{placed}, expected {placed_text(want, mesh)}"))

    def shape(self, shape: tuple[int, ...]) -> None:
        """Each size is the layout's."""
        try:
            dims = self.spec.expand(len(shape)).dims
            if self.use and not self.whole:
                for axis in self.spec.axes:
                    parts_of(axis, self.use.mesh, self.spec)
        except ShardError as error:
            everything = Span(0, len(self.spec.text))
            self.faults.append(Fault(error.spans or (everything,), error.headline))
            return
        for dim, rows in zip(dims, shape, strict=True):
            if dim not in self.spec.dims:  # one of those that '...' stands for
                continue
            try:
                self.dim(dim, rows)
            except LayoutError as error:
                self.faults.append(Fault(error.spans or (dim.span,), error.headline))

    def dim(self, dim: Dim, rows: int) -> None:
        """One size."""
        first = next(names_in(dim), None)
        packing = self.use.packings.get(first.name) if self.use and first else None
        if isinstance(dim, Int):
            self.compare(dim, rows, dim.value, "")
        elif packing and first:
            want = packing.rows if self.whole else self.rows(dim, {first.name: packing})
            self.compare(dim, rows, want, f" of {packing.rows}")
        elif isinstance(dim, Name):
            self.count(dim, dim.name, self.cut(dim), 1, rows)
        elif isinstance(dim, Group):
            self.fused(dim, rows)

    def compare(self, dim: Dim, rows: int, want: int | None, of: str) -> None:
        """The size is the one that is wanted."""
        if rows != want:
            self.faults.append(Fault((dim.span,), f"'{dim}' is {rows}, expected {want}{of}"))

    def count(self, dim: Dim, name: str, cut: Plain, times: int, rows: int) -> None:
        """The size fits what is known of a name's global size, or tells it."""
        known = self.known(name)
        claim = Claim(cut, times, self.places, rows, f"'{dim}' is {rows} in {self.source}")
        if prod(piece.ranks for piece in cut.cuts) == 1:
            self.settle(dim, name, rows * times)
        elif known is not None and not known.claims:
            self.compare(dim, rows, claim.local(known), f" of {name}={int(known)}")
        else:
            claims = known.claims if known is not None else ()
            claims = claims if claim in claims else (*claims, claim)
            size = find_size(claims)
            if size is None:
                told = ", ".join(claim.source for claim in claims[:-1])
                note = f"'{dim}' is {rows}, which fits no size of '{name}' where {told}"
                self.faults.append(Fault((dim.span,), note))
            else:
                self.found[name] = Extent(size, name, self.source, claims)

    def settle(self, dim: Dim, name: str, size: int) -> None:
        """A name has this global size."""
        known = self.known(name)
        if known is None or (known.claims and known.admits(size)):
            self.found[name] = Extent(size, name, self.source)
        elif known.claims:
            told = ", ".join(claim.source for claim in known.claims)
            self.faults.append(Fault((dim.span,), f"{name}={size} does not fit: {told}"))
        elif int(known) != size:
            self.faults.append(Fault((dim.span,), f"'{name}' is {size}, expected {int(known)}"))

    def fused(self, dim: Group, rows: int) -> None:
        """The size is the product of its dims', as far as they are known; it may tell one more."""
        inner = [split for item in dim.items for split in splits_in(item)]
        if unknown := [split for split in inner if split.order and not self.whole]:
            first = next(names_in(dim)).name
            note = f"'{dim}' needs to know its segments: use_mesh(mesh, {first}=Packing(...))"
            self.faults.append(Fault(tuple(split.order_span for split in unknown), note))
            return
        names = {name.name: self.known(name.name) for name in names_in(dim)}
        missing = [name for name, size in names.items() if size is None or size.claims]
        if missing:
            cut = self.cut(Name(label(dim), dim.splits, dim.span))
            axes = [str(axis) for split in inner for axis in split.axes]
            times = 1 if self.whole or not self.use else self.use.mesh.span(axes)
            self.count(dim, label(dim), cut, times, rows)
            total = self.known(label(dim))
            if len(missing) > 1 or total is None or total.claims:
                return
            self.derive(dim, missing[0], int(total))
        sizes = {name: int(size) for name in names if (size := self.known(name)) is not None}
        if len(sizes) == len(names) and not self.faults:
            whole = prod(sizes.values()) * _constant(dim)
            want = whole if self.whole else self.rows(dim, sizes)
            given = " ".join(f"{name}={size}" for name, size in sizes.items())
            self.compare(dim, rows, want, f" of {given}")

    def derive(self, dim: Group, name: str, total: int) -> None:
        """The one dim of a bracket that is not known yet."""
        others = (self.known(item.name) for item in names_in(dim) if item.name != name)
        rest = prod(int(size) for size in others if size is not None) * _constant(dim)
        if rest and total % rest:
            note = f"'{label(dim)}' is {total}, no multiple of {rest}"
            self.faults.append(Fault((dim.span,), note))
        elif rest:
            self.settle(dim, name, total // rest)

    def known(self, name: str) -> Extent | None:
        """What is known of a global size."""
        size = self.found.get(name, self.sizes.get(name))
        return size if size is None or isinstance(size, Extent) else Extent(size, name, "")

    def cut(self, dim: Name) -> Plain:
        """How a dim is cut, whatever its size."""
        bound = Plain(0) if self.whole else self.bound(dim, {dim.name: 0})
        return bound if isinstance(bound, Plain) else Plain(0)

    def rows(self, dim: Dim, sizes: Mapping[str, int | Packing]) -> int:
        """What this rank holds of a dim."""
        return self.bound(dim, sizes).pieces(self.places).rows

    def bound(self, dim: Dim, sizes: Mapping[str, int | Packing]) -> BoundDim:
        """One dim of the layout with its sizes."""
        mesh = self.use.mesh if self.use else MeshShape()
        return layout(Spec(self.spec.text, (dim,)), mesh, where=None, **sizes).bound[0]

    @property
    def places(self) -> Mapping[str, int]:
        """Where this rank is."""
        return self.use.mesh.coords(self.use.rank) if self.use else {}


def _constant(dim: Dim) -> int:
    """Product of the sizes that a bracket writes out."""
    match dim:
        case Int(value):
            return value
        case Group(items):
            return prod(map(_constant, items))
        case _:
            return 1
