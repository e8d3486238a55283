"""How the contiguous cuts of a program are written: joined, ``s@(dp cp)``, or apart, ``s@dp@cp``.

The search takes both as one, as they are where sizes divide. Here each of its states gets the one
or the other, so that every step undoes whole cuts, or makes new ones, and leaves the others as they
are written. Where a side, or what has been cut before, is written otherwise, an exchange of the dim
comes between: a *spelling*, which sends nothing where sizes divide. There are as few as can be, as
early as can be; what is free is joined.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from vlshard.programs.states import Cut, Cuts, apart, used_axes

# For an axis that is cut right behind another one of its sequence: whether as a cut of its own.
Borders = dict[str, bool]


class Spelled(NamedTuple):
    """How a dim comes to a state, and what a spelling makes of it before the next step."""

    cuts: Cuts
    respelled: Cuts | None = None


def spelled(cuts: Sequence[Cuts], exchanged: Sequence[bool], src: Cuts, dst: Cuts) -> list[Spelled]:
    """How a dim is written on its way.

    Args:
      cuts: its cuts before the first step and after each, one for each axis.
      exchanged: for each step, whether it is an exchange of this dim.
      src: its cuts before the first step, as written.
      dst: those after the last step.
    Returns: as many as ``cuts``: how it comes to each state, and what a spelling then makes of it.
    """
    last = len(cuts) - 1
    needs: list[Borders] = [{} for _ in cuts]
    marks = [False for _ in cuts]
    needs[last] = _borders(dst)
    for t in range(last - 1, -1, -1):
        need, marks[t + 1] = _need(cuts[t], cuts[t + 1], needs[t + 1], exchange=exchanged[t])
        needs[t] = need
    have = _borders(src)
    marks[0] = any(have[axis] != value for axis, value in needs[0].items())
    found: list[Spelled] = []
    for t, here in enumerate(cuts):
        if t:
            have = _after(cuts[t - 1], here, have, needs[t], exchange=exchanged[t - 1])
        want = {**have, **needs[t]}
        if marks[t]:
            found.append(Spelled(_written(here, have), _written(here, want)))
            have = want
        else:
            found.append(Spelled(_written(here, have)))
    return found


def _need(before: Cuts, after: Cuts, need: Borders, *, exchange: bool) -> tuple[Borders, bool]:
    """What borders must be before a step, and whether a spelling must come behind it."""
    if before == after:
        return need, False
    if exchange:
        return {}, False
    old, new = {*used_axes(before)}, {*used_axes(after)}
    if old < new:
        joint = [a for a in _followers(after) if a[0] in old and a[1] in new - old]
        if any(need.get(axis) is False for _, axis in joint):
            return {}, True
        return {axis: value for axis, value in need.items() if axis in old}, False
    joint = [a for a in _followers(before) if a[0] in new and a[1] in old - new]
    return {**need, **{axis: True for _, axis in joint}}, False


def _after(before: Cuts, after: Cuts, have: Borders, need: Borders, *, exchange: bool) -> Borders:
    """The borders after a step: those that stay, and for new ones what is needed, else none."""
    old = set[str]() if exchange else {*used_axes(before)}
    return {
        axis: have[axis] if axis in old else first in old or need.get(axis, False)
        for first, axis in _followers(after)
    }


def _followers(cuts: Cuts) -> list[tuple[str, str]]:
    """Axes of contiguous cuts that follow one another on the same part."""
    pairs = pairwise(cuts)
    return [
        (a.axes[-1], b.axes[0])
        for a, b in pairs
        if a.part == b.part and not a.order and not b.order
    ]


def _borders(cuts: Cuts) -> Borders:
    """Which axes begin a cut, of those that follow others in a sequence."""
    begins = {cut.axes[0] for cut in cuts}
    return {axis: axis in begins for _, axis in _followers(apart(cuts))}


def _written(cuts: Cuts, borders: Borders) -> Cuts:
    """Cuts joined but at borders."""
    found: list[Cut] = []
    for cut in cuts:
        last = found[-1] if found else None
        if last and borders.get(cut.axes[0]) is False and last.part == cut.part:
            found[-1] = Cut(cut.part, (*last.axes, *cut.axes))
        else:
            found.append(cut)
    return tuple(found)
