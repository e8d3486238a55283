"""Layout to layout: the steps that move a tensor, what they cost, and who sends which rows.

`transition` is the door: it reads two specs as `states`, `way` has `search` find the cheapest way
through `program_space` (steps in numbers are `changes`, what dims may be cut by `rules`), priced
there and in `exchange_cost`; `spelling` chooses how its cuts are written. `routes` says what a
step means for one rank, as `moves`: rows by index, planned among its `peers`. Integers only;
nothing is sent here.
"""

from vlshard.programs.moves import Even, Moves, Positions
from vlshard.programs.peers import Finder, Peers, grouped, plan_moves
from vlshard.programs.program import Program
from vlshard.programs.routes import Route, route
from vlshard.programs.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
    ZeroPad,
)
from vlshard.programs.transition import transition

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Even",
    "Exchange",
    "Finder",
    "Moves",
    "Peers",
    "Positions",
    "Program",
    "ReduceScatter",
    "Route",
    "Slice",
    "Step",
    "ZeroPad",
    "grouped",
    "plan_moves",
    "route",
    "transition",
]
