"""The segments of a packed dim: how long each is and who loaded it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from operator import index
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from vlshard.language.arrays import IntArray
from vlshard.language.errors import LayoutError


@dataclass(frozen=True, init=False)
class Packing:
    """Segments that lie one after another along one tensor dim.

    Attributes:
      lengths: rows of each segment.
      unit: rows that no cut parts; every length is a multiple of it.
      home: rank along the home axis that holds each segment from the start, or None.
      cost: (a, b): a segment of n rows costs ``a * n**2 + b * n`` where segments are dealt evenly.
      homes: ranks along the home axes, where a spec's ``.home`` names only the leading ones of
        them; None if it names all.
    """

    lengths: tuple[int, ...]
    unit: int
    home: tuple[int, ...] | None
    cost: tuple[float, float]
    homes: int | None

    def __init__(
        self,
        lengths: Sequence[int],
        unit: int = 1,
        home: Sequence[int] | None = None,
        cost: tuple[float | int, float | int] = (0.0, 1.0),
        homes: int | None = None,
    ) -> None:
        """Take any sequences of integers.

        Raises: LayoutError if a length is negative or no multiple of the unit, if home and
          lengths differ in number, or if a cost is no finite number of at least 0.
        """
        set_field = object.__setattr__
        set_field(self, "unit", integer("unit", unit, least=1))
        set_field(self, "lengths", integers("lengths", lengths, least=0))
        set_field(self, "home", None if home is None else integers("home", home, least=0))
        set_field(self, "cost", coefficients(cost))
        set_field(self, "homes", None if homes is None else integer("homes", homes, least=1))
        for segment, length in enumerate(self.lengths):
            if length % self.unit:
                raise LayoutError(
                    f"packing: segment {segment} has {length} rows, no multiple of unit {unit}",
                    notes=[f"a unit is never cut: pad it to {-(-length // unit) * unit} rows"],
                )
        if self.home is not None and len(self.home) != len(self.lengths):
            raise LayoutError(
                f"packing: {len(self.lengths)} lengths, but home names {len(self.home)} segments"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Worked out once, of numbers alone (the same in each process): look-ups ask for it."""
        return hash((self.lengths, self.unit, self.home or (), self.cost, self.homes or 0))

    @cached_property
    def rows(self) -> int:
        """Rows of all segments together."""
        return sum(self.lengths)

    @cached_property
    def lengths_array(self) -> IntArray:
        """The lengths as an array, made once and not to be written to."""
        return read_only(self.lengths)

    @cached_property
    def ends(self) -> IntArray:
        """Where each segment ends, not to be written to."""
        return read_only(np.cumsum(self.lengths_array))

    @cached_property
    def home_array(self) -> IntArray:
        """The homes as an array, made once and not to be written to; empty if none are known."""
        return read_only(self.home or ())

    def costs_of(self, segments: IntArray) -> NDArray[np.float64]:
        """Cost of each of some segments.

        Counted by units, so that the pack of merged units (with the cost of a unit) gives the same
        numbers to the last bit, and is dealt alike.
        """
        a, b = self.cost
        units = (self.lengths_array[segments] // self.unit).astype(np.float64)
        return (a * self.unit * self.unit * units + b * self.unit) * units


def read_only(values: Sequence[int] | IntArray) -> IntArray:
    """Integers as an array of the right dtype, also where there are none."""
    array = np.array(values, np.int64)
    array.setflags(write=False)
    return array


def coefficients(cost: object) -> tuple[float, float]:
    """The two cost coefficients as floats."""
    match cost:
        case (int() | float() as a, int() | float() as b) if (
            isfinite(a) and isfinite(b) and min(a, b) >= 0
        ):
            return float(a), float(b)
        case _:
            raise LayoutError(
                f"packing: cost is {cost!r}, not two finite numbers (a, b) of at least 0"
            )


def integers(field: str, values: Sequence[int], least: int) -> tuple[int, ...]:
    """The values as plain integers, each at least ``least``."""
    given = tuple(values)
    if all(type(value) is int for value in given) and min(given, default=least) >= least:
        return given
    return tuple(integer(f"{field}[{i}]", value, least) for i, value in enumerate(given))


def integer(field: str, value: object, least: int) -> int:
    """The value as a plain integer."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise LayoutError(f"packing: {field} is {value!r}, not an integer")
    if index(value) < least:
        raise LayoutError(f"packing: {field} is {value}, less than {least}")
    return index(value)
