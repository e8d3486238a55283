"""Pictures of layouts and programs in the terminal, with colour where there is any."""

from collections.abc import Sequence
from typing import NamedTuple

from vlshard.cli.picture import Holder, Picture, Strip, heading, held_of, notes, runs
from vlshard.language import Layout, Pieces

COLOURS = (34, 33, 32, 35, 36, 31, 94, 92)
MOST_RUNS = 4
MOST_CELLS = 48


class Mark(NamedTuple):
    """Text of one colour; None is the terminal's own."""

    text: str
    colour: int | None = None


Line = Sequence[Mark]


def rendered(lines: Sequence[Line], *, colour: bool) -> str:
    """Lines as text for a terminal, with its colour codes or without."""
    return "\n".join("".join(_painted(mark, colour) for mark in line).rstrip() for line in lines)


def _painted(mark: Mark, colour: bool) -> str:
    """Text, in colour if it has any."""
    if mark.colour is None or not colour:
        return mark.text
    return f"\x1b[1;{COLOURS[mark.colour % len(COLOURS)]}m{mark.text}\x1b[0m"


def show(layouts: Sequence[Layout], program: str = "") -> list[Line]:
    """Who holds what, with the program between two layouts.

    Args:
      layouts: one, or the ones before and after.
      program: the steps as text.
    """
    lines: list[Line] = []
    for number, one in enumerate(layouts):
        if number:
            lines += [[], *([Mark(line)] for line in program.splitlines()), []]
        lines += _layout(Picture(one))
    return lines


def _layout(picture: Picture) -> list[Line]:
    """A heading, a table, and what the table does not say."""
    found = [*map(_scale, picture.strips), *notes(picture)]
    rest: list[Line] = [[], *([Mark(note)] for note in found if note)] if any(found) else []
    return [[Mark(heading(picture.layout))], [], *_table(picture), *rest]


def _table(picture: Picture) -> list[Line]:
    """A row of cells for each holder, columns aligned."""
    head: list[Line] = [[Mark("ranks")], *([Mark(part)] for part in picture.axes)]
    head += [[Mark(f"{strip.name}: {strip.size:,}")] for strip in picture.strips]
    head += [[Mark("local shape")]]
    rows = [head, *(_row(picture, holder) for holder in picture.holders)]
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    lines: list[Line] = []
    for row in rows:
        line: list[Mark] = []
        for cell, width in zip(row, widths, strict=True):
            line += [*cell, Mark(" " * (width - _width(cell) + 2))]
        lines.append(line)
    if picture.hidden:
        lines.append([Mark(f"... and {picture.hidden:,} more")])
    return lines


def _row(picture: Picture, holder: Holder) -> list[Line]:
    """The cells of one holder."""
    row: list[Line] = [[Mark(holder.name, holder.number)]]
    row += [[Mark(str(holder.places[part]))] for part in picture.axes]
    for strip in picture.strips:
        pieces = holder.pieces[strip.number]
        if pieces is None:
            row.append([Mark("not drawn")])
            continue
        cells = _cells(strip, pieces)
        row.append([*_coloured(cells, holder.number), Mark("  " + _runs(pieces))])
    return [*row, [Mark(" ".join(map(str, holder.shape)) or "a number")]]


def _cells(strip: Strip, pieces: Pieces) -> str:
    """``##..|..``: units that are held, with a bar where a segment ends.

    A dim of many units is drawn to scale, without segments; ``+`` is a cell held in part.
    """
    units = strip.size // strip.unit
    ends = {*strip.ends[:-1]} if units <= MOST_CELLS else set[int]()
    cells = min(units, MOST_CELLS)
    bounds = [strip.size * cell // cells for cell in range(cells + 1)] if cells else []
    held = held_of(pieces, bounds) if cells else []
    text = ""
    for cell, rows in enumerate(held):
        whole = bounds[cell + 1] - bounds[cell]
        text += "#" if rows == whole else "+" if rows else "."
        if bounds[cell + 1] in ends:
            text += "|"
    return text


def _coloured(cells: str, colour: int) -> Line:
    """The cells that are held in the holder's colour, the others in none."""
    marks: list[Mark] = []
    for cell in cells:
        own = colour if cell in "#+" else None
        if marks and marks[-1].colour == own:
            marks[-1] = Mark(marks[-1].text + cell, own)
        else:
            marks.append(Mark(cell, own))
    return marks


def _runs(pieces: Pieces) -> str:
    """``0-1 14-15``: the indices held, in local order."""
    firsts, stops = runs(pieces)
    words = [
        str(first) if first == stop - 1 else f"{first}-{stop - 1}"
        for first, stop in zip(firsts[:MOST_RUNS].tolist(), stops[:MOST_RUNS].tolist(), strict=True)
    ]
    more = [f"+{firsts.size - MOST_RUNS} more"] if firsts.size > MOST_RUNS else []
    return " ".join(words + more) or "nothing"


def _scale(strip: Strip) -> str:
    """What a cell of a strip stands for, where that is not one row."""
    if strip.size > MOST_CELLS * strip.unit:
        rows = f"{strip.size / MOST_CELLS:,.0f} rows"
        return f"{strip.name}: a cell is about {rows}, + is held in part"
    unit = f"{strip.unit} rows" if strip.unit > 1 else "one row"
    return f"{strip.name}: a cell is a unit of {unit}, | ends a segment" if strip.ends else ""


def _width(cell: Line) -> int:
    """Characters of a cell."""
    return sum(len(mark.text) for mark in cell)
