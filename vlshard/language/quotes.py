"""What a message quotes, cut to a length that people read."""

from collections.abc import Iterable, Sequence

MOST_LETTERS = 160  # of one quote
MOST_LINES = 30  # of one message
MOST_TEXT = 400  # of a spec
MOST_LINE = 2000  # of a line, which may name several files


def clipped(value: object, most: int = MOST_LETTERS) -> str:
    """A text, or what an object prints, short enough to be quoted: its middle is left out.

    Args:
      value: what is quoted.
      most: letters that are kept.
    """
    text = str(value)
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}... ({len(text):,} characters) ...{text[-most // 4 :]}"


def clipped_path(path: object) -> str:
    """The name of a file, in full unless it is no name that a file could have."""
    return clipped(path, MOST_LINE // 2)


def clipped_each(text: str) -> str:
    """A text of several lines, each of which is short enough."""
    return "\n".join(clipped(line, MOST_LINE) for line in text.split("\n"))


def clipped_lines(lines: Sequence[str], most: int = MOST_LINES) -> list[str]:
    """The first of many lines, and how many are left out."""
    left = len(lines) - most
    return list(lines) if left < 1 else [*lines[:most], f"and {left:,} more"]


def window(text: str, places: Iterable[int], most: int = MOST_TEXT) -> tuple[str, set[int]]:
    """The part of a long text around the first of some places in it.

    Args:
      text: what is quoted.
      places: characters of it that are pointed at.
      most: letters that are kept.
    Returns: the part, with dots where something is left out, and the places in it.
    """
    marked = set(places)
    if len(text) <= most:
        return text, marked
    first = min(marked, default=0)
    start = max(0, min(first - most // 4, len(text) - most))
    lead, tail = "..." if start else "", "..." if start + most < len(text) else ""
    shift = len(lead) - start
    kept = {place + shift for place in marked if start <= place < start + most}
    return f"{lead}{text[start : start + most]}{tail}", kept
