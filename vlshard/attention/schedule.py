"""How one micro-batch meets attention: planned on the host, once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vlshard.attention.kernels import Kernel, attend_runs, takes_all_runs
from vlshard.attention.modes import Heads, Mode, Ways
from vlshard.attention.ring_attention import RingPlan, ring_attention
from vlshard.attention.ring_plan import plan_ring
from vlshard.attention.runs import Runs
from vlshard.attention.segments import seen_rows, segment_runs
from vlshard.comm import Index, Mesh, RowMove, row_move
from vlshard.language import IntArray, Layout, cutting_axes, ranges
from vlshard.programs import Moves, Peers, grouped


@dataclass(frozen=True)
class Site:
    """Who holds which rows of an attention site, and which rows see each other.

    Attributes:
      mesh: the ranks.
      layout: layout of the rows; its last dim is a width.
      segments: rows of each segment; a row sees its own segment only.
      causal: a row sees only itself and the rows before it.
      heads: heads of queries and of keys.
      one_row: the rows are a pack that is the only row of a batch.
      cutting: parts of the mesh that cut inside segments; None reads them off a layout of tokens.
    """

    mesh: Mesh
    layout: Layout
    segments: Sequence[int] | IntArray
    causal: bool
    heads: Heads
    one_row: bool = False
    cutting: tuple[str, ...] | None = None
    _rows: dict[int, IntArray] = field(default_factory=dict[int, IntArray], compare=False)

    def rows(self, rank: int) -> IntArray:
        """Global rows of a rank in local order; positions of a batch count row after row."""
        if rank not in self._rows:
            rows, *inner = self.layout.indices(rank)[:-1]
            for held, size in zip(inner, self.layout.shape[1:-1], strict=True):
                rows = (rows[:, None] * size + held).ravel()
            self._rows[rank] = rows
        return self._rows[rank]

    def holders(self, rows: IntArray) -> dict[str, IntArray]:
        """Where along each axis that cuts the site the rank is that holds each of some rows."""
        found: dict[str, IntArray] = {}
        for dim in reversed(range(len(self.layout.shape) - 1)):
            rows, inner = np.divmod(rows, self.layout.shape[dim]) if dim else (rows, rows)
            found |= self.layout.holders(inner, dim)
        return found

    @cached_property
    def lengths(self) -> IntArray:
        """Rows of each segment."""
        return np.asarray(self.segments, dtype=np.int64)

    @cached_property
    def ends(self) -> IntArray:
        """Where each segment ends."""
        return np.cumsum(self.lengths)

    @property
    def lead(self) -> tuple[int, ...]:
        """This rank's sizes of the dims that a tensor has before its heads."""
        lead = self.layout.local_shape(self.mesh.here)[:-1]
        return (1, *lead) if self.one_row else lead


@dataclass(frozen=True)
class Schedule:
    """How one site's attention is met.

    Attributes:
      q: brings the queries to where they are attended.
      kv: brings keys, and values, there.
      back: brings the result back.
      attended: which keys each run of queries sees, or the ring by which the keys come.
      lead: sizes that the rows of the result have before its heads.
      overlap: moves fly until their result is asked for.
      kernel: what attends to runs; None takes the device's own.
      heads: heads of queries and of keys that a rank computes.
    """

    q: RowMove
    kv: RowMove
    back: RowMove
    attended: Runs | RingPlan
    lead: tuple[int, ...]
    overlap: bool
    kernel: Kernel | None = None
    heads: Heads | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of what the moves brought, back where the queries came from.

        The way back is waited for at once: the output projection needs all of it.
        """
        if isinstance(self.attended, RingPlan):
            out = ring_attention(q, k, v, self.attended)
        else:
            out = attend_runs(q, k, v, self.attended, self.kernel)
        out = self.back(out)
        return out.reshape(*self.lead, *out.shape[1:])

    def indices(self, device: str, dtype: torch.dtype) -> list[Index]:
        """What the moves and attention index tensors by.

        Args:
          device: kind of the device.
          dtype: of queries and keys.
        """
        moved = [index for move in (self.q, self.kv, self.back) for index in move.indices]
        if isinstance(self.attended, RingPlan):
            return moved + self.attended.indices
        return moved + self.attended.indices(takes_all_runs(device, dtype))


@dataclass(frozen=True)
class _Dealing:
    """A site under a mode: rows and heads of this rank while it attends, and who else needs them.

    Attributes:
      site: the rows.
      ways: the axes over which queries and keys are brought together.
    """

    site: Site
    ways: Ways

    @cached_property
    def degree(self) -> int:
        """Ranks to which heads are dealt."""
        return self.site.mesh.span(self.ways.ulysses)

    @cached_property
    def kv_blocks(self) -> int:
        """Blocks into which key heads are cut; fewer than ranks where heads are fewer."""
        return min(self.degree, self.site.heads.kv)

    def peers(self, *ways: tuple[str, ...]) -> Peers:
        """The ranks along the axes of some ways."""
        mesh = self.site.mesh
        return Peers(mesh, mesh.expand([axis for way in ways for axis in way]), mesh.here)

    def rows_of(self, rank: int) -> IntArray:
        """Rows of the queries that a rank attends, increasing where heads are dealt."""
        if self.degree == 1:
            return self.site.rows(rank)
        peers = self.site.mesh.peers(self.ways.ulysses, rank)
        return np.sort(np.concatenate([self.site.rows(peer) for peer in peers]))

    @cached_property
    def rows(self) -> IntArray:
        """Those of this rank."""
        return self.rows_of(self.site.mesh.here)

    @cached_property
    def keys(self) -> IntArray:
        """Rows of the keys that this rank has when it begins to attend."""
        if not self.ways.gather:
            return self.rows
        return seen_rows(self.rows, self.site.lengths, self.site.causal)

    @cached_property
    def q(self) -> Moves:
        """The move of queries: each of the ranks gets its heads of all rows."""
        everything = np.arange(self.own.size)
        readers = dict.fromkeys(range(self.degree), everything)
        return self._moves(self.ways.ulysses, readers, self.rows, self.degree)

    @property
    def own(self) -> IntArray:
        """Rows that this rank holds."""
        return self.site.rows(self.site.mesh.here)

    @cached_property
    def kv(self) -> Moves:
        """The move of keys, or of values, to those whose queries see them."""
        if not self.ways.gather:
            readers = dict.fromkeys(range(self.degree), np.arange(self.own.size))
            return self._moves(self.ways.ulysses, readers, self.keys, self.kv_blocks)
        readers = {
            group * self.degree + place: rows
            for group, rows in self._readers().items()
            for place in range(self.degree)
        }
        axes = (*self.ways.gather, *self.ways.ulysses)
        return self._moves(axes, readers, self.keys, self.kv_blocks)

    def _moves(
        self, axes: tuple[str, ...], readers: Mapping[int, IntArray], want: IntArray, blocks: int
    ) -> Moves:
        """Moves of rows in blocks of heads, of which each reader attends one.

        Args:
          axes: the axes of the group; those over which heads are dealt are the last.
          readers: by member of the group, positions of the rows of this rank that it needs.
          want: the rows that this rank needs.
          blocks: into how many blocks the heads of a row are cut.
        """
        peers = self.peers(axes)
        sources = np.broadcast_to(peers.number(self.site.holders(want)), want.shape)
        send = {
            member: rows * blocks + member % self.degree * blocks // self.degree
            for member, rows in readers.items()
        }
        return Moves(
            me=peers.me,
            send=send,
            receive=grouped(np.arange(want.size), sources),
            rows=self.own.size * blocks,
            size=want.size,
            local=not self._travels(axes),
        )

    def _travels(self, axes: tuple[str, ...]) -> bool:
        """Whether rows may leave a rank over some axes: heads are dealt, or segments cut."""
        layout, cutting = self.site.layout, self.site.cutting
        if cutting is None:
            cutting = cutting_axes(layout.spec, layout.mesh)
        cutting = {*cutting, *layout.mesh.expand(self.ways.ulysses)}
        return any(layout.mesh.parts[axis] > 1 for axis in self.peers(axes).axes if axis in cutting)

    def _readers(self) -> dict[int, IntArray]:
        """By place along the gathering axes, positions of this rank's rows that are seen there.

        The queries that see a row are in its segment, so only this rank's segments are looked at.
        """
        ends, lengths = self.site.ends, self.site.lengths
        touched = np.unique(np.searchsorted(ends, self.own, "right"))
        rows = ranges(ends[touched] - lengths[touched], lengths[touched])
        gather = self.peers(self.ways.gather)
        reader = np.broadcast_to(gather.number(self.site.holders(rows)), rows.shape)
        segment = np.repeat(np.arange(touched.size), lengths[touched])
        pairs, last = np.unique((segment * gather.size + reader)[::-1], return_index=True)
        last = rows[rows.size - 1 - last]  # of a segment, the last row that each reader holds
        begins = np.searchsorted(self.own, (ends - lengths)[touched])[pairs // gather.size]
        seen = last + 1 if self.site.causal else ends[touched][pairs // gather.size]
        stops = np.searchsorted(self.own, seen)
        counts = np.maximum(stops - begins, 0)
        return grouped(ranges(begins, counts), np.repeat(pairs % gather.size, counts))

    def ring(self, overlap: bool) -> RingPlan:
        """The ring of keys and values."""
        mesh = self.site.mesh
        peers = mesh.peers(self.ways.ring, mesh.here)
        rows = [self.rows_of(peer) for peer in peers]
        plan = plan_ring(rows, self.site.lengths, self.site.causal, peers.index(mesh.here))
        alone = len(peers) == 1 or mesh.imagined
        group = None if alone else mesh.group(self.ways.ring)
        return RingPlan(plan.me, plan.rows, plan.reach, plan.pairs, group, overlap)


def schedule(site: Site, mode: Mode | None, kernel: Kernel | None = None) -> Schedule:
    """How a site's attention is met.

    All-to-all and gather are one exchange of rows, cut into blocks of heads: each rank is sent
    its block of the heads of the rows that it needs. In a hybrid this moves as many bytes as an
    all-to-all followed by a gather.

    Args:
      site: the rows.
      mode: how keys are brought to the queries; None if each rank has them.
      kernel: what attends to runs; None takes the device's own. A ring has its own.
    """
    ways = mode.ways if mode else Ways()
    overlap = mode is not None and mode.overlap
    dealing, mesh = _Dealing(site, ways), site.mesh
    if ways.ring:
        attended = dealing.ring(overlap)
    else:
        attended = segment_runs(dealing.rows, dealing.keys, site.lengths, site.causal)
    degree, kv_axes = dealing.degree, (*ways.gather, *ways.ulysses)
    return Schedule(
        q=row_move(dealing.q, ways.ulysses, mesh, before=degree),
        kv=row_move(dealing.kv, kv_axes, mesh, before=dealing.kv_blocks),
        back=row_move(dealing.q.reverse, ways.ulysses, mesh, after=degree),
        attended=attended,
        lead=site.lead,
        overlap=overlap,
        kernel=kernel,
        heads=site.heads,
    )
