"""A step in numbers: which kind it is, what it changes, where it leads and what it costs."""

from enum import IntEnum
from typing import NamedTuple

from vlshard.programs.states import Axes

# A state in numbers: which cuts each dim has, and the pending axes as bits.
Node = tuple[int, ...]


class StepKind(IntEnum):
    """The kinds of steps, in the order in which they are preferred."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_TO_ALL = 2
    SLICE = 3
    ALL_REDUCE = 4
    EXCHANGE = 5


class Change(NamedTuple):
    """A step in numbers.

    Attributes:
      kind: which kind of step.
      axes: what it is over, in the order in which they were cut, or are now; none of an exchange.
      dims: the dims that it changes, in the order of its class's fields.
      after: the state that it leads to.
      cost: what it costs; of an exchange at least.
    """

    kind: int
    axes: Axes
    dims: tuple[int, ...]
    after: Node
    cost: int


class Cost(NamedTuple):
    """What is sent by the rank that sends most, and by all ranks together."""

    most: int
    total: int
