"""Pictures of layouts and programs as SVG: one bar for each holder and split dim, to scale."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from vlshard.cli.picture import Picture, Strip, heading, held_of, notes, runs
from vlshard.language import Layout, Pieces

PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8c6bb1",
    "#7f7f00",
)
MARGIN, GAP = 16.0, 28.0
LINE, BAR = 20, 14
CHARACTER = 7.3
# Runs, or segments, that are drawn one by one.
MOST_BOXES = 400
STYLE = (
    "text { font: 12px ui-monospace, monospace; fill: #222; } "
    ".title { font-weight: bold; } .small { font-size: 10px; fill: #666; }"
)


def draw(layouts: Sequence[Layout], program: str = "", most: int = 64) -> str:
    """Draw layouts one under another, each but the last followed by the program.

    Args:
      layouts: one, or the ones before and after.
      program: lines that stand between two layouts.
      most: holders that are drawn of each.
    Returns: the text of an SVG file, the same for the same input.
    """
    canvas = Canvas()
    for number, one in enumerate(layouts):
        if number:
            for line in program.splitlines():
                canvas.line(line)
            canvas.skip()
        draw_layout(canvas, Picture(one, most))
        canvas.skip()
    return canvas.text()


class Canvas:
    """SVG elements from top to bottom."""

    def __init__(self) -> None:
        self.y = LINE
        self._width = 0.0
        self._elements: list[str] = []

    def skip(self, height: int = LINE) -> None:
        """Leave room."""
        self.y += height

    def write(self, x: float, text: str, kind: str = "") -> float:
        """Put text on the current line; returns where it ends."""
        style = f' class="{kind}"' if kind else ""
        self._elements.append(
            f'<text x="{x:g}" y="{self.y + BAR - 3}" xml:space="preserve"{style}>'
            f"{escape(text)}</text>"
        )
        end = x + CHARACTER * len(text)
        self._width = max(self._width, end)
        return end

    def line(self, text: str, kind: str = "") -> None:
        """A line of text."""
        self.write(MARGIN, text, kind)
        self.skip()

    def box(self, x: float, width: float, colour: str) -> None:
        """A filled part of a bar on the current line."""
        self._elements.append(
            f'<rect x="{x:.6g}" y="{self.y}" width="{width:.6g}" height="{BAR}" fill="{colour}"/>'
        )
        self._width = max(self._width, x + width)

    def text(self) -> str:
        """The whole file."""
        width, height = round(self._width + MARGIN), self.y + LINE
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">'
        )
        background = '<rect width="100%" height="100%" fill="white"/>'
        return "\n".join([head, f"<style>{STYLE}</style>", background, *self._elements, "</svg>\n"])


def draw_layout(canvas: Canvas, picture: Picture) -> None:
    """A heading, scales, a row of bars for each holder, and notes."""
    layout = picture.layout
    canvas.line(heading(layout), "title")
    names = [_label(picture, number) for number in range(len(picture.holders))]
    left = MARGIN + CHARACTER * max(map(len, names)) + GAP / 2
    wide = 480.0 if len(picture.strips) == 1 else 300.0
    starts = [left + (wide + GAP) * number for number in range(len(picture.strips))]
    for start, strip in zip(starts, picture.strips, strict=True):
        canvas.write(start, f"{strip.name}: {strip.size:,}")
    canvas.skip()
    for name, holder in zip(names, picture.holders, strict=True):
        canvas.write(MARGIN, name)
        colour = PALETTE[holder.number % len(PALETTE)]
        for start, strip in zip(starts, picture.strips, strict=True):
            _bar(canvas, start, wide, strip, holder.pieces[strip.number], colour)
        shape = " ".join(map(str, holder.shape)) or "a number"
        canvas.write(left + (wide + GAP) * len(starts), f"local shape {shape}")
        canvas.skip()
    if picture.hidden:
        canvas.line(f"... and {picture.hidden:,} more")
    for note in (*_ends(picture), *notes(picture)):
        canvas.line(note, "small")


def _label(picture: Picture, number: int) -> str:
    """``rank 1 5  cp=1``: a holder's ranks and place."""
    holder = picture.holders[number]
    places = " ".join(f"{part}={place}" for part, place in holder.places.items())
    return f"rank{'s' * (holder.copies > 1)} {holder.name}  {places}".rstrip()


def _bar(
    canvas: Canvas, start: float, wide: float, strip: Strip, pieces: Pieces | None, colour: str
) -> None:
    """The whole dim in grey, what is held in colour, and where segments end in white.

    Of very many runs, columns are drawn: wholly held, or in part.
    """
    canvas.box(start, wide, "#e4e4e4")
    scale = wide / strip.size if strip.size else 0.0
    if pieces is None:
        return
    firsts, stops = runs(pieces)
    if firsts.size <= MOST_BOXES:
        for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True):
            canvas.box(start + scale * first, scale * (stop - first), colour)
    else:
        bounds = [strip.size * column // MOST_BOXES for column in range(MOST_BOXES + 1)]
        for column, rows in enumerate(held_of(pieces, bounds)):
            share = rows / (bounds[column + 1] - bounds[column])
            if share:
                shade = colour + f"{round(55 + 200 * share):02x}"
                canvas.box(start + wide * column / MOST_BOXES, wide / MOST_BOXES, shade)
    if len(strip.ends) <= MOST_BOXES:
        for end in strip.ends[:-1]:
            canvas.box(start + scale * end - 0.75, 1.5, "white")


def _ends(picture: Picture) -> list[str]:
    """What the bars say of segments and of many runs."""
    found: list[str] = []
    for strip in picture.strips:
        if len(strip.ends) > MOST_BOXES:
            found.append(f"{strip.name}: the ends of {len(strip.ends):,} segments are not drawn")
        elif strip.ends:
            found.append(f"{strip.name}: white lines end segments")
        held = (holder.pieces[strip.number] for holder in picture.holders)
        if any(pieces and runs(pieces)[0].size > MOST_BOXES for pieces in held):
            cut = f"drawn in {MOST_BOXES} columns, lighter where less is held"
            found.append(f"{strip.name}: what more than {MOST_BOXES} runs hold is {cut}")
    return found
