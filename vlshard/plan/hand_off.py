"""Hands visual rows over: from where the vision encoder left them to their placeholders."""

import numpy as np

from vlshard.comm import Mesh, RowMove, plan_row_move
from vlshard.language import IntArray, Layout, Packing
from vlshard.plan.header import StepHeader
from vlshard.plan.tokens import token_places


def visual_positions(header: StepHeader, unit: int, length: int) -> IntArray:
    """Which visual token lies at each position of each sample.

    Args:
      header: the micro-batch.
      unit: patches of a visual token.
      length: positions of the table; no sample has more.
    Returns: [samples, length]: index of the visual token in reading order, or -1.
    """
    table = np.full((len(header.samples), length), -1, dtype=np.int64)
    count = 0
    for row, sample in enumerate(header.samples):
        for start, (h, w) in zip(sample.starts, sample.frames, strict=True):
            tokens = h * w // unit
            table[row, start : start + tokens] = np.arange(count, count + tokens)
            count += tokens
    return table


def hand_off(
    rows: Layout, tokens: Layout, table: IntArray, axes: tuple[str, ...], mesh: Mesh
) -> RowMove:
    """Bring each visual row to the ranks whose tokens hold its placeholder, once to each.

    Args:
      rows: layout of the visual rows, in reading order.
      tokens: layout of the tokens.
      table: ``visual_positions`` of the micro-batch.
      axes: mesh axes over which rows may travel.
      mesh: the ranks.
    """
    peers = mesh.peers(axes, mesh.rank)
    have = [rows.indices(peer)[0] for peer in peers]
    held = [table[token_places(tokens, peer)].ravel() for peer in peers]
    want = [visual[visual >= 0] for visual in held]
    return plan_row_move(have, want, axes, mesh)


def merged(packing: Packing) -> Packing:
    """The pack of merged rows: one row a unit, so no unit to keep whole; dealt as the patches."""
    unit, (a, b) = packing.unit, packing.cost
    lengths = [length // unit for length in packing.lengths]
    cost = (a * unit * unit, b * unit)
    return Packing(lengths, unit=1, home=packing.home, cost=cost, homes=packing.homes)
