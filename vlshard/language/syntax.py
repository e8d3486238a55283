"""The tree that a spec is read into: frozen nodes, each with its characters in the text.

The characters serve messages; they do not count in comparisons.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from vlshard.language.errors import Span, SpecError

# Orders of a split that are no contiguous blocks.
ORDERS = ("zigzag", "balance", "home")


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or one part of a split one."""

    name: str
    part: str | None = None
    span: Span = field(default=Span(0, 0), compare=False, repr=False)

    def __str__(self) -> str:
        return self.name if self.part is None else f"{self.name}.{self.part}"


@dataclass(frozen=True)
class Split:
    """A cut over axes (major to minor), in contiguous blocks or in the named order."""

    axes: tuple[Axis, ...]
    order: str | None = None
    span: Span = field(default=Span(0, 0), compare=False, repr=False)

    @property
    def order_span(self) -> Span:
        """The characters of the order."""
        return Span(self.span.stop - len(self.order or ""), self.span.stop)

    def __str__(self) -> str:
        axes = " ".join(map(str, self.axes))
        joined = f"({axes})" if len(self.axes) > 1 else axes
        return f"@{joined}" + (f".{self.order}" if self.order else "")


@dataclass(frozen=True)
class Name:
    """A named dim and its splits, applied left to right."""

    name: str
    splits: tuple[Split, ...] = ()
    span: Span = field(default=Span(0, 0), compare=False, repr=False)

    @property
    def name_span(self) -> Span:
        """The characters of the bare name."""
        return Span(self.span.start, self.span.start + len(self.name))

    def __str__(self) -> str:
        return self.name + "".join(map(str, self.splits))


@dataclass(frozen=True)
class Int:
    """A dim, or a factor of one, whose size is written in the spec."""

    value: int
    span: Span = field(default=Span(0, 0), compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Group:
    """One tensor dim made of several: packed if the first is bound to a Packing, else fused."""

    items: tuple["Name | Int | Group", ...]
    splits: tuple[Split, ...] = ()
    span: Span = field(default=Span(0, 0), compare=False, repr=False)

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.items))})" + "".join(map(str, self.splits))


@dataclass(frozen=True)
class Dots:
    """Any number of dims, whole on each rank."""

    span: Span = field(default=Span(0, 0), compare=False, repr=False)

    def __str__(self) -> str:
        return "..."


Item = Name | Int | Group
Dim = Name | Int | Group | Dots


@dataclass(frozen=True)
class Spec:
    """Where a tensor lives: its dims and the axes over which a sum is pending.

    ``text`` is what the spans count in: the spec as written, or the whole arrow that it is a
    side of. ``str`` is the canonical text, which parses to an equal spec.
    """

    text: str = field(compare=False, repr=False)
    dims: tuple[Dim, ...]
    pending: tuple[Axis, ...] = ()

    def __str__(self) -> str:
        pending = ["+", *map(str, self.pending)] if self.pending else []
        return " ".join([*map(str, self.dims), *pending])

    @property
    def names(self) -> tuple[str, ...]:
        """All dim names, in order, those inside brackets too."""
        return tuple(name.name for dim in self.dims for name in names_in(dim))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes as they occur: of splits in the order of application, then pending ones."""
        return (*(a for d in self.dims for s in splits_in(d) for a in s.axes), *self.pending)

    def label(self, index: int) -> str:
        """Dim ``index`` without its splits: ``s`` or ``(h d)``."""
        return label(self.dims[index])

    def expand(self, ndim: int) -> "Spec":
        """The spec of a tensor of ``ndim`` dims: ``...`` becomes unsplit dims ``_0 _1 ...``.

        Args:
          ndim: number of dims of the tensor.
        Returns: a spec without ``...``.
        Raises: SpecError if the spec has another number of dims, or too many beside its dots.
        """
        at = next((i for i, dim in enumerate(self.dims) if isinstance(dim, Dots)), None)
        count = ndim - len(self.dims) + (at is not None)
        if count < 0 or (at is None and count > 0):
            headline = f"the spec has {len(self.dims) - (at is not None)} dims, the tensor {ndim}"
            raise SpecError(headline, text=self.text)
        if at is None:
            return self
        filled = tuple(Name(f"_{i}", span=self.dims[at].span) for i in range(count))
        return replace(self, dims=self.dims[:at] + filled + self.dims[at + 1 :])


def names_in(dim: Dim) -> Iterator[Name]:
    """The names of a dim, left to right."""
    match dim:
        case Name():
            yield dim
        case Group(items):
            for item in items:
                yield from names_in(item)
        case Int() | Dots():
            pass


def splits_in(dim: Dim) -> Iterator[Split]:
    """The splits of a dim in the order in which they apply: inside-out, then left to right."""
    if isinstance(dim, Group):
        for item in dim.items:
            yield from splits_in(item)
    if isinstance(dim, Name | Group):
        yield from dim.splits


def label(dim: Dim) -> str:
    """A dim without its splits."""
    match dim:
        case Name(name):
            return name
        case Group(items):
            return f"({' '.join(map(label, items))})"
        case Int() | Dots():
            return str(dim)
