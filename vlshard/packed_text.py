"""Causal attention inside the samples of a pack, whichever way the pack is cut."""

from collections.abc import Sequence

import einops
import numpy as np
from torch import Tensor

from vlshard.attention import Runs
from vlshard.dims import Packed
from vlshard.header import IntArray
from vlshard.layout import Layout
from vlshard.mesh import Mesh
from vlshard.schedule import Move, Schedule, row_move, stay, ulysses_schedule
from vlshard.settings import Gather, Heads, Ulysses


def packed_text_schedule(
    tokens: Layout, mode: Ulysses | Gather | None, heads: Heads, mesh: Mesh
) -> Schedule:
    """Causal attention inside each sample of a pack, which is one row of tokens.

    Args:
      tokens: layout of the pack.
      mode: how keys that other ranks hold are met; None where no sample is cut.
      heads: of the decoder.
      mesh: the ranks.
    """
    pack = tokens.bound[0]
    if not isinstance(pack, Packed):
        raise AssertionError(f"{tokens.spec} is no pack")
    lengths = pack.packing.lengths
    rows = tokens.indices(mesh.rank)[0]
    if mode is None:
        return Schedule(stay, stay, stay, causal_runs(rows, rows, lengths), stay)
    peers = mesh.peers((mode.axis,), mesh.rank)
    have = [tokens.indices(peer)[0] for peer in peers]
    if isinstance(mode, Ulysses):
        gathered = np.sort(np.concatenate(have))
        runs = causal_runs(gathered, gathered, lengths)
        found = ulysses_schedule(tokens, mode.axis, heads, mesh, runs)
        q, k, v, back = map(_in_one_row, (found.q, found.k, found.v, found.back))
        return Schedule(q, k, v, runs, back)
    want = [seen_rows(held, lengths) for held in have]
    bring = row_move(have, want, (mode.axis,), mesh, 1)
    runs = causal_runs(rows, want[peers.index(mesh.rank)], lengths)
    return Schedule(stay, bring, bring, runs, stay)


def seen_rows(rows: IntArray, lengths: Sequence[int]) -> IntArray:
    """The rows that queries see: of each sample, all up to the last query; increasing.

    Args:
      rows: rows of the queries in the pack.
      lengths: rows of each sample.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    last = np.full(len(lengths), -1)
    np.maximum.at(last, np.searchsorted(ends, rows, side="right"), rows)
    sample = np.repeat(np.arange(len(lengths)), lengths)
    return np.flatnonzero(np.arange(sample.size) <= last[sample])


def causal_runs(rows: IntArray, keys: IntArray, lengths: Sequence[int]) -> Runs:
    """Which keys the queries of a cut pack see: those of their own sample up to themselves.

    Args:
      rows: rows of the queries in the pack, in local order.
      keys: rows of the keys, increasing; of each touched sample all that its queries see.
      lengths: rows of each sample.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    sample = np.searchsorted(ends, rows, side="right")
    new = (np.diff(sample, prepend=-1) != 0) | (np.diff(rows, prepend=-1) != 1)
    starts = np.flatnonzero(new)
    q_lengths = np.diff(starts, append=rows.size)
    first = (ends - np.asarray(lengths, dtype=np.int64))[sample[starts]]
    k_lengths = rows[starts] + q_lengths - first
    table = np.stack([starts, q_lengths, np.searchsorted(keys, first), k_lengths]).tolist()
    return Runs(*map(tuple, table), causal=True)


def _in_one_row(move: Move) -> Move:
    """A move of a pack's rows, for a tensor in which they are the only row of a batch."""

    def moved(x: Tensor) -> Tensor:
        rows = move(einops.rearrange(x, "1 s h d -> s h d"))
        return einops.rearrange(rows, "s h d -> 1 s h d")

    return moved
