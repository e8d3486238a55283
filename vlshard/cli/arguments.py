"""What the command line gives: a mesh, sizes and packings, read from short texts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import NamedTuple, NoReturn, TypeVar

from vlshard.language import (
    Dim,
    Group,
    LayoutError,
    MeshShape,
    Name,
    Packing,
    PlanError,
    Span,
    Spec,
    names_in,
    nearest,
)

ITEM = re.compile(r"[^,]+")
KINDS: Mapping[type, str] = {int: "integer", float: "number"}
N = TypeVar("N", int, float)
SMALLEST = 2
MOST_NUMBERS = 12
MOST_DIGITS = 18


def read_mesh(text: str) -> MeshShape:
    """Read the sizes of a mesh.

    Args:
      text: ``cp=4,tp=2``; axes split into parts are written ``cp=2x4`` (parts ``cp.0``, ``cp.1``)
        or ``cp=ring:2/ulysses:4`` (parts ``cp.ring``, ``cp.ulysses``). The empty text is one rank.
    Returns: the mesh, outermost axis first.
    Raises: PlanError if the text is no mesh.
    """
    sizes: dict[str, int | tuple[int, ...] | dict[str, int]] = {}
    for name, value, span in _assignments(text):
        named = [part.partition(":") for part in value.split("/")]
        if any(len(number) > MOST_DIGITS for number in re.findall(r"\d+", value)):
            _refuse_mesh(f"a size has at most {MOST_DIGITS} digits", text, span)
        if name in sizes:
            _refuse_mesh(f"mesh axis '{name}' occurs twice", text, span)
        if value.isdecimal():
            sizes[name] = int(value)
        elif all(part.isdecimal() for part in value.split("x")):
            sizes[name] = tuple(int(part) for part in value.split("x"))
        elif all(part.isidentifier() and size.isdecimal() for part, _, size in named):
            if len({part for part, _, _ in named}) < len(named):
                _refuse_mesh(f"a part of mesh axis '{name}' occurs twice", text, span)
            sizes[name] = {part: int(size) for part, _, size in named}
        else:
            _refuse_mesh(f"'{text[span.start : span.stop].strip()}' is no mesh axis", text, span)
    return MeshShape(**sizes)


def _assignments(text: str) -> Iterator[tuple[str, str, Span]]:
    """Names and values of a text like ``a=1,b=2``; what is none has an empty name and value."""
    for item in ITEM.finditer(text):
        if item.group().strip():
            name, _, value = (part.strip() for part in item.group().partition("="))
            good = name.isidentifier() and value.isascii()
            yield (name if good else "", value if good else "", _stripped(item))


def _stripped(item: re.Match[str]) -> Span:
    """The characters of an item without the blanks around it."""
    blanks = len(item.group()) - len(item.group().lstrip())
    return Span(item.start() + blanks, item.start() + len(item.group().rstrip()))


def _refuse_mesh(headline: str, text: str, span: Span) -> NoReturn:
    note = "a mesh is written 'dp=2,cp=4'; axes with parts 'cp=2x4' or 'cp=ring:2/ulysses:4'"
    raise PlanError(headline, text=text, spans=[span], where="--mesh", notes=[note])


def read_sizes(text: str) -> dict[str, int]:
    """Read the sizes of dims.

    Args:
      text: ``s=16,h=8``.
    Raises: LayoutError if the text is no list of sizes.
    """
    sizes: dict[str, int] = {}
    for name, value, span in _assignments(text):
        if not value.isdecimal() or len(value) > MOST_DIGITS:
            headline = f"'{text[span.start : span.stop]}' is no size of a dim"
            note = "sizes are written 's=16,h=8'"
            raise LayoutError(headline, text=text, spans=[span], where="--sizes", notes=[note])
        if name in sizes:
            headline = f"the size of '{name}' is given twice"
            raise LayoutError(headline, text=text, spans=[span], where="--sizes")
        sizes[name] = int(value)
    return sizes


def read_numbers(text: str, option: str, kind: type[N]) -> list[N]:
    """Read numbers.

    Args:
      text: ``24,16,48``.
      option: the option that takes them, for messages.
      kind: int or float.
    Raises: LayoutError if the text is no list of such numbers.
    """
    numbers: list[N] = []
    for item in ITEM.finditer(text):
        word = item.group().strip()
        try:
            numbers.append(kind(word))
        except ValueError:
            name = KINDS[kind]
            raise LayoutError(
                f"'{word}' is no {name}",
                text=text,
                spans=[_stripped(item)],
                where=option,
                notes=[f"{option} takes {name}s: '24,16,48'"],
            ) from None
    return numbers


class Segments(NamedTuple):
    """What the command line says of a packed dim, or of rows that stay at home."""

    lengths: Sequence[int] | None = None
    unit: int = 1
    home: Sequence[int] | None = None
    cost: tuple[float, float] = (0.0, 1.0)


def complete(
    sides: Sequence[Spec], mesh: MeshShape, sizes: Mapping[str, int], segments: Segments
) -> dict[str, int | Packing]:
    """A size for every dim of one or two specs of the same dims.

    A dim without a size gets the least that gives two rows to each part it is cut into.

    Args:
      sides: the specs.
      mesh: the mesh that they are on.
      sizes: the sizes that are given.
      segments: the segments of the first bracket of two names, which is then packed, or the
        homes of rows.
    Returns: sizes in the order of the dims.
    Raises: LayoutError if a size is for no dim, or what is said of segments for none.
    """
    names = sides[0].names
    for name in sizes:
        if name not in names:
            note = f"names: {' '.join(names) or 'none'}{nearest(name, names)}"
            raise LayoutError(f"size {name}= is for no dim of the spec", notes=[note])
    _check_use(segments)
    packed = _packed(sides[0]) if segments.lengths is not None else None
    found: dict[str, int | Packing] = {}
    for position, dim in enumerate(sides[0].dims):
        if packed and dim is packed:
            found |= _packing(packed, sides, sizes, segments)
            continue
        for name in names_in(dim):
            least = lcm(*(_parts(side.dims[position], name.name, mesh) for side in sides))
            found[name.name] = sizes.get(name.name, SMALLEST * least)
    return found | _homes(sides, mesh, found, sizes, segments)


def _check_use(segments: Segments) -> None:
    """What is said of segments is of use only where there are some."""
    if segments.lengths is not None:
        return
    for option, given, default in (
        ("--unit", segments.unit, Segments().unit),
        ("--cost", segments.cost, Segments().cost),
    ):
        if given != default:
            note = "fix: give their lengths too, --lengths 24,16,48, or leave it out"
            raise LayoutError(f"{option} is for segments, of which there are none", notes=[note])


def _packed(side: Spec) -> Group:
    """The bracket that ``--lengths`` is for."""
    for dim in side.dims:
        match dim:
            case Group((Name(), Name())):
                return dim
            case _:
                continue
    headline = "--lengths is for a bracket of two names, the segments and their rows: '(img s)'"
    raise LayoutError(headline, text=side.text)


def _packing(
    dim: Group, sides: Sequence[Spec], sizes: Mapping[str, int], segments: Segments
) -> dict[str, int | Packing]:
    """The Packing of a bracket, by the name of its segments."""
    first, rows = (name.name for name in names_in(dim))
    for name in (first, rows):
        if name in sizes:
            headline = f"'{name}' takes no size: --lengths has them"
            raise LayoutError(headline, text=sides[0].text, spans=[dim.span])
    lengths, unit, home, cost = segments
    named = [(side, n) for side in sides for d in side.dims for n in names_in(d) if n.name == first]
    for side, name in named:
        spans = [split.order_span for split in name.splits if split.order == "home"]
        if spans and home is None:
            headline = f"'.home' needs --home: who loaded each of the {len(lengths or ())} segments"
            raise LayoutError(headline, text=side.text, spans=spans)
    return {first: Packing(lengths or (), unit, home, cost)}


def _parts(dim: Dim, name: str, mesh: MeshShape) -> int:
    """Into how many parts a dim's splits cut the rows of one of its names.

    What cuts a bracket as a whole cuts its first name.
    """
    if not isinstance(dim, Name | Group):
        return 1
    names = [inner.name for inner in names_in(dim)]
    inner = [_parts(item, name, mesh) for item in dim.items] if isinstance(dim, Group) else []
    splits = dim.splits if names[:1] == [name] else ()
    axes = [str(axis) for split in splits for axis in split.axes]
    ranks = mesh.span([axis for axis in axes if axis in mesh.sizes or axis in mesh.parts])
    return prod(inner) * ranks * 2 ** sum(split.order == "zigzag" for split in splits)


def _homes(
    sides: Sequence[Spec],
    mesh: MeshShape,
    found: Mapping[str, int | Packing],
    sizes: Mapping[str, int],
    segments: Segments,
) -> dict[str, int | Packing]:
    """Who holds the rows of plain dims that stay at home; even blocks unless given."""
    packings: dict[str, int | Packing] = {}
    for side in sides:
        for dim in side.dims:
            if not isinstance(dim, Name) or all(split.order != "home" for split in dim.splits):
                continue
            rows = found[dim.name]
            home = segments.home
            if home is None and dim.name not in sizes and isinstance(rows, int):
                stay = tuple(split for split in dim.splits if split.order == "home")
                ranks = _parts(replace(dim, splits=stay), dim.name, mesh)
                home = [row * ranks // rows for row in range(rows)]
            if home is None or (dim.name in sizes and len(home) != rows):
                headline = f"--home has to name the holder of each of the {rows} rows"
                raise LayoutError(headline, text=side.text, spans=[dim.name_span])
            packings[dim.name] = Packing([1] * len(home), home=home)
    return packings


def written(sizes: Mapping[str, int | Packing]) -> str:
    """Sizes as a line: ``s=16 img=24,16,48 at home 0,0,1``."""
    return " ".join(f"{name}={_written(size)}" for name, size in sizes.items()) or "none"


def _written(size: int | Packing) -> str:
    """One size; of rows that are at home, their number."""
    if isinstance(size, int):
        return str(size)
    rows = all(length == 1 for length in size.lengths)
    text = str(size.rows) if rows else _shortened(size.lengths)
    return text if size.home is None else f"{text} at home {_shortened(size.home)}"


def _shortened(values: Sequence[int]) -> str:
    """The first of many numbers."""
    tail = f",... ({len(values)} in all)" if len(values) > MOST_NUMBERS else ""
    return ",".join(map(str, values[:MOST_NUMBERS])) + tail
