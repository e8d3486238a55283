"""Typed look-ups in a settings file, which collect all that is wrong before anything is raised."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from model.config.files import quoted

MOST = 2**24  # of any size: widths, tokens, experts, patches


class Settings:
    """One section of a settings file.

    A look-up that fails adds a line to ``problems`` and gives the default, so that one pass over
    the file finds every fault.
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str], name: str = "") -> None:
        """Look into a section.

        Args:
          values: its content.
          problems: where faults are added; shared by all sections of a file.
          name: dotted path of the section in the file, with a dot at its end.
        """
        self._values = values
        self._problems = problems
        self._name = name

    def section(self, key: str) -> "Settings":
        """A nested object; absent or null reads as empty."""
        value = self._take(key, {}, lambda x: isinstance(x, dict), "an object")
        return Settings(value, self._problems, f"{self._name}{key}.")

    def integer(self, key: str, default: int, *, least: int = 1, most: int = MOST) -> int:
        """A whole number between ``least`` and ``most``; what is beyond is no size of a model."""
        value = self._take(key, default, lambda x: is_whole(x, least), f"an int >= {least}")
        if value > most:
            self.problem(f"{key} = {quoted(value)}: expected at most {most:,}")
            return default
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number of at least 0."""
        return float(self._take(key, default, is_number, "a number >= 0"))

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0."""
        wanted = "a number above 0"
        return float(self._take(key, default, lambda x: is_number(x) and float(x) > 0, wanted))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._take(key, default, lambda x: isinstance(x, bool), "true or false")

    def integers(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A list of whole numbers of at least 0."""
        return tuple(self._take(key, default, are_whole, "a list of ints >= 0"))

    def one_of(self, key: str, *served: Any) -> Any:
        """A value out of those that are served; the first one if nothing is said."""
        return self._take(key, served[0], lambda x: x in served, " or ".join(map(repr, served)))

    def get(self, key: str) -> Any:
        """The value as it stands, or None."""
        return self._values.get(key)

    def is_null(self, key: str) -> bool:
        """Whether the file says null, which is not the same as saying nothing."""
        return key in self._values and self._values[key] is None

    def problem(self, text: str) -> None:
        """Add a fault of this section."""
        self._problems.append(f"{self._name}{text}")

    def _take(self, key: str, default: Any, valid: Callable[[Any], bool], wanted: str) -> Any:
        value = self._values.get(key)
        if value is None:
            return default
        if not valid(value):
            self.problem(f"{key} = {quoted(value)}: expected {wanted}")
            return default
        return value


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether this is a whole number (no bool) of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def are_whole(value: Any) -> bool:
    """Whether this is a list of whole numbers of at least 0."""
    return isinstance(value, list | tuple) and all(is_whole(item) for item in value)


def is_number(value: Any) -> bool:
    """Whether this is a finite number (no bool) of at least 0."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and 0 <= value <= sys.float_info.max
