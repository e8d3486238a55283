"""The ``images`` of a row to paths: names of files are taken, what else there is, is named."""

import os
import re
from pathlib import Path
from typing import Any
from unicodedata import normalize
from urllib.parse import unquote

from vlshard.language import clipped, clipped_path

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
MOST_LETTERS = 4095  # of a path, on the systems that this runs on


class NameFault(ValueError):
    """An entry of ``images`` that names no file."""


def image_paths(names: Any, parent: Path) -> tuple[Path, ...]:
    """Where a row's images are.

    Args:
      names: value of the row's key ``images``; None is no image.
      parent: folder to which names are relative.
    Returns: one path an image; a name that is spelt in another Unicode form than its file finds it.
    Raises: NameFault saying what was found and how to write it.
    """
    if names is None:
        return ()
    if not isinstance(names, list):
        raise NameFault(f'images: found {kind_of(names)}, expected a list of paths, as ["a.png"]')
    for place, name in enumerate(names):
        fault = _fault(name)
        if fault is not None:
            raise NameFault(f"images[{place}]: found {fault}")
    return tuple(_existing(parent, name) for name in names)


def kind_of(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _fault(name: Any) -> str | None:
    """What an entry is instead of a path, and what to write; None if it may be one."""
    if isinstance(name, dict):
        return f"an object with keys {clipped(list(name))}, expected a path: {_of_object(name)}"
    if not isinstance(name, str):
        return f"{kind_of(name)}, expected a path"
    if not name.strip():
        return "an empty string, expected a path"
    if name.startswith("data:") and "," in name:
        return f"inline data ({len(name):,} characters), expected a path: write it to a file"
    url = URL.match(name)
    if url and url[1].lower() == "file":
        path = "/" + unquote(name[url.end() :]).partition("/")[2]
        return f"a file URL, expected a path: write {clipped_path(path)!r}"
    if url:
        return f"a URL ({clipped(url[1], 20)}), expected a path: download it to a file"
    if len(name) > MOST_LETTERS:
        return f"a string of {len(name):,} characters, expected a path: write inline data to a file"
    if "\0" in name:
        return "a string with a zero byte, expected a path"
    return None


def _of_object(entry: dict[str, Any]) -> str:
    """How an entry of another data format is written here."""
    path = entry.get("path")
    if isinstance(path, str) and path:
        return f"write {clipped_path(path)!r} itself"
    return "write its bytes to a file, and name that"


def _existing(parent: Path, name: str) -> Path:
    """The path of a name, in the Unicode form in which there is such a file, if in any."""
    forms = (name, normalize("NFC", name), normalize("NFD", name))
    return next((parent / form for form in forms if os.path.exists(parent / form)), parent / name)
