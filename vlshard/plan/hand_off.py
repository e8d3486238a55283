"""Hands visual rows over: from where the vision encoder left them to their placeholders."""

from functools import partial
from typing import NamedTuple

import numpy as np

from vlshard.comm import Mesh, RowMove, row_move
from vlshard.language import IntArray, Layout, Packing
from vlshard.plan.header import StepHeader
from vlshard.plan.tokens import token_holders, token_places
from vlshard.programs import Peers, plan_moves


class Placeholders(NamedTuple):
    """Where the visual tokens of a micro-batch have their places; runs in reading order.

    Attributes:
      samples: sample of each run.
      starts: token offset of each run in its sample.
      ends: number of visual tokens in all runs up to and with each.
    """

    samples: IntArray
    starts: IntArray
    ends: IntArray

    @classmethod
    def of(cls, header: StepHeader, unit: int) -> "Placeholders":
        """The runs of a micro-batch, for so many patches to a visual token."""
        table = header.table
        samples = np.repeat(np.arange(len(table)), table.frame_counts)
        return cls(samples, table.starts, np.cumsum(table.frames.prod(axis=1) // unit))

    def places(self, visual: IntArray) -> tuple[IntArray, IntArray]:
        """Sample and position of visual tokens, given by their numbers in reading order."""
        run = np.searchsorted(self.ends, visual, "right")
        before = np.concatenate([[0], self.ends])[run]
        return self.samples[run], self.starts[run] + visual - before

    def among(self, samples: IntArray, positions: IntArray) -> IntArray:
        """Numbers of the visual tokens that are among some tokens, in the order of the tokens."""
        if not self.ends.size or not samples.size:
            return np.empty(0, np.int64)
        width = int(max(self.starts.max(), positions.max())) + 1
        run = np.searchsorted(
            self.samples * width + self.starts, samples * width + positions, "right"
        )
        run = np.maximum(run - 1, 0)
        inside = positions - self.starts[run]
        lengths = np.diff(self.ends, prepend=0)
        visual = (self.samples[run] == samples) & (inside >= 0) & (inside < lengths[run])
        return (self.ends[run] - lengths[run] + inside)[visual]


def hand_off(
    rows: Layout, tokens: Layout, placeholders: Placeholders, axes: tuple[str, ...], mesh: Mesh
) -> RowMove:
    """Bring each visual row to the ranks whose tokens hold its placeholder, once to each.

    Args:
      rows: layout of the visual rows, in reading order.
      tokens: layout of the tokens.
      placeholders: where visual tokens have their places.
      axes: mesh axes over which rows may travel.
      mesh: the ranks.
    """
    have = rows.indices(mesh.here)[0]
    samples, positions = token_places(tokens, mesh.here)
    want = placeholders.among(samples.ravel(), positions.ravel())

    def wanted_by(visual: IntArray) -> dict[str, IntArray]:
        return token_holders(tokens, *placeholders.places(visual))

    # Where rows are whole over all of these axes, each rank has what its tokens want.
    local = not set(axes) & set(rows.bound[0].axes)
    finders = (partial(rows.holders, dim=0), wanted_by)
    moves = plan_moves(have, want, finders, Peers(mesh, axes, mesh.here), local=local)
    return row_move(moves, axes, mesh)


def merged(packing: Packing) -> Packing:
    """The pack of merged rows: one row a unit, so no unit to keep whole; dealt as the patches."""
    unit, (a, b) = packing.unit, packing.cost
    lengths = [length // unit for length in packing.lengths]
    cost = (a * unit * unit, b * unit)
    return Packing(lengths, unit=1, home=packing.home, cost=cost, homes=packing.homes)
