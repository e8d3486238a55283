"""Errors that show the spec and point at the culprit."""

from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from vlshard.language.quotes import clipped_each, clipped_lines, clipped_path, window


class Span(NamedTuple):
    """Characters ``start`` to ``stop - 1`` of a spec's text."""

    start: int
    stop: int


class ShardError(ValueError):
    """What is wrong, where, and what would be right; ``str`` of it is the whole message.

    Attributes:
      headline: what is wrong, with the values.
      text: the spec or arrow as written, or None.
      spans: the characters of ``text`` that are at fault.
      where: the place that the text belongs to, such as ``plans/long.py:41 text.q``, or None.
      notes: lines that say what is known and what would help.
    """

    __module__ = "vlshard"

    def __init__(
        self,
        headline: str,
        *,
        text: str | None = None,
        spans: Sequence[Span] = (),
        where: str | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(headline)
        self.headline = headline
        self.text = text
        self.spans = tuple(spans)
        self.where = where
        self.notes = tuple(notes)

    def __str__(self) -> str:
        lines = [clipped_each(self.headline)]
        where = clipped_path(self.where) if self.where else ""
        if self.text is not None:
            lead = f"{where}: " if where else ""
            marked = {i for start, stop in self.spans for i in range(start, stop)}
            text, marked = window("".join(" " if c.isspace() else c for c in self.text), marked)
            lines.append(lead + text)
            if self.spans:
                lines.append(" " * len(lead) + underline(marked))
        elif where:
            lines.append(where)
        return "\n  ".join([*lines, *clipped_lines([clipped_each(note) for note in self.notes])])


class SpecError(ShardError):
    """A text that is no spec or no arrow."""

    __module__ = "vlshard"


class LayoutError(ShardError):
    """A spec that does not fit its mesh, its sizes or another layout."""

    __module__ = "vlshard"


class PlanError(ShardError):
    """A mesh or a plan that does not fit the model or the number of ranks."""

    __module__ = "vlshard"


def underline(marked: Collection[int]) -> str:
    """Carets under all the marked characters, as one line."""
    return "".join("^" if i in marked else " " for i in range(max(marked, default=-1) + 1))


# Names longer than this are not compared, and no more than so many names with one.
LONGEST_NAME, MOST_NAMES = 64, 256


def nearest(name: str, known: Collection[str]) -> str:
    """Tail of a message that offers the names most like a misspelt one.

    The search is bounded: nothing is offered for a very long name, or instead of one.

    Args:
      name: the name that is not known.
      known: the names that are.
    Returns: ``"; did you mean 'cp' or 'dp'?"``, or nothing if no name is near.
    """
    best, offered = max(1, len(name) // 3), list[str]()
    if len(name) > LONGEST_NAME:
        return ""
    alike = (other for other in known if abs(len(other) - len(name)) <= max(1, len(name) // 3))
    for other in islice(alike, MOST_NAMES):
        distance = edit_distance(name.lower(), other.lower(), best)
        # A name of which nothing is left is not alike, however short it is.
        if distance > best or distance >= max(len(name), len(other)):
            continue
        if distance < best:
            best, offered = distance, []
        offered.append(f"'{other}'")
    if not offered:
        return ""
    offers = sorted(set(offered))
    return f"; did you mean {' or '.join(filter(None, (', '.join(offers[:-1]), offers[-1])))}?"


def edit_distance(a: str, b: str, most: int | None = None) -> int:
    """Fewest insertions, deletions, changes and swaps of neighbours that make a into b.

    Args:
      a: a text.
      b: another.
      most: where more are needed than this, any larger number may be returned.
    """
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        if most is not None and min(*rows[-1], *row) > most:
            return most + 1
        rows = [rows[-1], row]
    return rows[-1][-1]
