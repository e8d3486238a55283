"""What is read from outside: regular files only, JSON without doubled keys, quotes of some length.

Everything that a user's files can make long goes through ``clipped`` before it is in a message.
"""

import json
import stat
from collections import Counter
from os import stat as stat_of
from pathlib import Path
from typing import Any

from vlshard.language import clipped

KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class OddFileError(OSError):
    """Something in place of a file: a pipe, a device, a directory."""

    def __init__(self, text: str) -> None:
        """Say what was found."""
        super().__init__(text)
        self.strerror = text


def quoted(value: Any) -> str:
    """What a value is in Python, short enough for a message."""
    try:
        return clipped(repr(value))
    except ValueError:  # Python prints no integer of that many digits
        return "a number of thousands of digits"


def json_text(value: Any) -> str:
    """A value as JSON, short enough to be quoted."""
    return clipped(json.dumps(value))


def odd_file(path: str | Path) -> str | None:
    """Why something is no file whose bytes can be read again and again, or None.

    Raises: OSError if it is not there.
    """
    mode = stat_of(path).st_mode
    if stat.S_ISREG(mode):
        return None
    kind = next((name for holds, name in KINDS if holds(mode)), "no regular file")
    return f"found {kind}, expected a file"


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises: OSError if it is not there or no regular file; ValueError or RecursionError if it is no
      JSON, or has a key twice.
    """
    odd = odd_file(path)
    if odd is not None:
        raise OddFileError(odd)
    return parse_json(path.read_text(encoding="utf-8"))


def parse_json(text: str) -> Any:
    """JSON in which no object has a key twice.

    Raises: ValueError or RecursionError if it is none.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise ValueError(f"duplicate keys: {clipped(', '.join(twice))}")
    return keys
