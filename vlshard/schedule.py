"""How one micro-batch meets attention and hands visual rows over: planned on the host, once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import einops
import numpy as np
from torch import Tensor

from vlshard.attention import Runs
from vlshard.axes import ulysses_specs
from vlshard.collectives import exchange_rows, plan_moves
from vlshard.header import IntArray, StepHeader
from vlshard.layout import Layout
from vlshard.mesh import Mesh
from vlshard.packing import Packing
from vlshard.reshard import lower
from vlshard.settings import Gather, Heads, Ulysses
from vlshard.tokens import token_places
from vlshard.transition import transition

Move = Callable[[Tensor], Tensor]


def stay(x: Tensor) -> Tensor:
    """The move of a tensor that is where it is needed."""
    return x


@dataclass(frozen=True)
class Schedule:
    """How one site's attention is met.

    Attributes:
      q: brings the queries to where they are attended.
      k: brings the keys.
      v: brings the values.
      runs: which keys each run of queries sees, in flat rows of what the moves gave.
      back: brings the result back to the queries' layout.
    """

    q: Move
    k: Move
    v: Move
    runs: Runs
    back: Move


def row_move(
    have: Sequence[IntArray], want: Sequence[IntArray], axes: tuple[str, ...], mesh: Mesh, dim: int
) -> Move:
    """A differentiable exchange of rows of one dim between the ranks along the axes.

    Args:
      have: global rows that each of these ranks holds, in local order.
      want: global rows that each of them shall hold.
      axes: the axes, in the order of the ranks.
      mesh: the ranks; its group is asked for only where rows travel.
      dim: the dim.
    """
    moves = plan_moves(have, want, mesh.peers(axes, mesh.rank).index(mesh.rank))
    if moves.identity:
        return stay
    group = None if moves.local else mesh.group(axes)
    return lambda x: exchange_rows(x, dim, moves, group)


def whole_rows(rows: int, length: int) -> Runs:
    """Causal attention of whole rows, one after another."""
    return Runs.segments([length] * rows, causal=True)


def segment_runs(rows: IntArray, keys: IntArray, segments: Sequence[int]) -> Runs:
    """Which keys the queries of a cut pack see: all rows of their own segment.

    Args:
      rows: global rows of the queries, in local order.
      keys: global rows of the keys, increasing, every touched segment whole.
      segments: length of each segment of the pack.
    """
    ends = np.cumsum(segments, dtype=np.int64)
    segment = np.searchsorted(ends, rows, side="right")
    breaks = np.flatnonzero((np.diff(segment) != 0) | (np.diff(rows) != 1)) + 1
    if rows.size == 0:
        return Runs((), (), (), ())
    starts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([starts, [rows.size]]))
    owner = segment[starts]
    k_lengths = np.asarray(segments, dtype=np.int64)[owner]
    k_starts = np.searchsorted(keys, ends[owner] - k_lengths)
    table = np.stack([starts, lengths, k_starts, k_lengths]).tolist()
    return Runs(*map(tuple, table), causal=False)


def touched_rows(rows: IntArray, segments: Sequence[int]) -> IntArray:
    """All rows of every segment that the given rows belong to, increasing."""
    ends = np.cumsum(segments, dtype=np.int64)
    owner = np.repeat(np.arange(len(segments)), segments)
    touched = np.zeros(len(segments), dtype=bool)
    touched[np.searchsorted(ends, rows, side="right")] = True
    return np.flatnonzero(touched[owner])


def prefix_runs(rows: int, positions: IntArray, keys: int) -> Runs:
    """Causal runs of cut rows: each chunk of positions sees all keys up to its end.

    Args:
      rows: rows of tokens.
      positions: global positions of the queries, in local order.
      keys: positions that each row has keys for, from 0.
    """
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    chunks = [chunk for chunk in np.split(positions, breaks) if chunk.size]
    offsets = np.cumsum([0, *(chunk.size for chunk in chunks)])
    q_starts = [b * positions.size + int(o) for b in range(rows) for o in offsets[:-1]]
    k_starts = [b * keys for b in range(rows) for _ in chunks]
    q_lengths = [chunk.size for chunk in chunks] * rows
    k_lengths = [int(chunk[-1]) + 1 for chunk in chunks] * rows
    return Runs(tuple(q_starts), tuple(q_lengths), tuple(k_starts), tuple(k_lengths), causal=True)


def vision_schedule(
    patches: Layout,
    segments: Sequence[int],
    mode: Ulysses | Gather | None,
    heads: Heads,
    mesh: Mesh,
) -> Schedule:
    """Attention inside each segment of a pack of patches, every query seeing every key."""
    rank = mesh.rank
    rows = patches.indices(rank)[0]
    if mode is None:
        return Schedule(stay, stay, stay, segment_runs(rows, rows, segments), stay)
    if isinstance(mode, Ulysses):
        peers = mesh.peers((mode.axis,), rank)
        all_rows = np.sort(np.concatenate([patches.indices(peer)[0] for peer in peers]))
        runs = segment_runs(all_rows, all_rows, segments)
        return ulysses_schedule(patches, mode.axis, heads, mesh, runs)
    peers = mesh.peers((mode.axis,), rank)
    have = [patches.indices(peer)[0] for peer in peers]
    want = [touched_rows(held, segments) for held in have]
    bring = row_move(have, want, (mode.axis,), mesh, 0)
    runs = segment_runs(rows, want[peers.index(rank)], segments)
    return Schedule(stay, bring, bring, runs, stay)


def text_schedule(
    tokens: Layout, mode: Ulysses | Gather | None, heads: Heads, mesh: Mesh
) -> Schedule:
    """Causal attention inside each row of tokens."""
    rank = mesh.rank
    rows, length = tokens.local_shape(rank)[0], tokens.shape[1]
    if mode is None:
        return Schedule(stay, stay, stay, whole_rows(rows, length), stay)
    if isinstance(mode, Ulysses):
        return ulysses_schedule(tokens, mode.axis, heads, mesh, whole_rows(rows, length))
    peers = mesh.peers((mode.axis,), rank)
    have = [tokens.indices(peer)[1] for peer in peers]
    want = [np.arange(int(held.max(initial=-1)) + 1) for held in have]
    me = peers.index(rank)
    bring = row_move(have, want, (mode.axis,), mesh, 1)
    return Schedule(stay, bring, bring, prefix_runs(rows, have[me], want[me].size), stay)


def ulysses_schedule(tokens: Layout, axis: str, heads: Heads, mesh: Mesh, runs: Runs) -> Schedule:
    """All-to-all from tokens to heads; kv heads are repeated to the degree where they are fewer."""
    q, kv, width = heads
    degree = mesh.span((axis,))
    copies = max(1, degree // kv)
    before, after = ulysses_specs(tokens.spec, axis, mesh)
    to_heads, to_tokens = transition(before, after, mesh), transition(after, before, mesh)
    sizes = {name: size for name, size in tokens.sizes.items() if name not in ("c", "m")}
    q_sizes = {**sizes, "h": q, "d": width}
    kv_sizes = {**sizes, "h": kv * copies, "d": width}
    bring = lower(to_heads, mesh, q_sizes)
    bring_shared = lower(to_heads, mesh, kv_sizes)

    def repeat(x: Tensor) -> Tensor:
        return bring_shared(einops.repeat(x, "... kv d -> ... (kv g) d", g=copies))

    share = repeat if copies > 1 else bring_shared
    return Schedule(bring, share, share, runs, lower(to_tokens, mesh, q_sizes))


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
) -> Move:
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
    return row_move(have, want, axes, mesh, 0)


def merged(packing: Packing) -> Packing:
    """The pack of merged rows: one row a unit, so no unit to keep whole; dealt as the patches."""
    unit, (a, b) = packing.unit, packing.cost
    lengths = [length // unit for length in packing.lengths]
    cost = (a * unit * unit, b * unit)
    return Packing(lengths, unit=1, home=packing.home, cost=cost, homes=packing.homes)
