"""How one micro-batch meets attention: planned on the host, once."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from vlshard.attention.kernels import Kernel, attend_runs
from vlshard.attention.modes import Heads, Mode, Ways
from vlshard.attention.ring_attention import RingPlan, ring_attention
from vlshard.attention.ring_plan import plan_ring
from vlshard.attention.runs import Runs
from vlshard.attention.segments import seen_rows, segment_runs
from vlshard.comm import Mesh, RowMove, plan_row_move
from vlshard.language import IntArray, Layout


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
    """

    mesh: Mesh
    layout: Layout
    segments: tuple[int, ...]
    causal: bool
    heads: Heads
    one_row: bool = False
    _rows: dict[int, IntArray] = field(default_factory=dict[int, IntArray], compare=False)

    def rows(self, rank: int) -> IntArray:
        """Global rows of a rank in local order; positions of a batch count row after row."""
        if rank not in self._rows:
            rows, *inner = self.layout.indices(rank)[:-1]
            for held, size in zip(inner, self.layout.shape[1:-1], strict=True):
                rows = (rows[:, None] * size + held).ravel()
            self._rows[rank] = rows
        return self._rows[rank]

    @property
    def lead(self) -> tuple[int, ...]:
        """This rank's sizes of the dims that a tensor has before its heads."""
        lead = self.layout.local_shape(self.mesh.rank)[:-1]
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
    """

    q: RowMove
    kv: RowMove
    back: RowMove
    attended: Runs | RingPlan
    lead: tuple[int, ...]
    overlap: bool
    kernel: Kernel | None = None

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


@dataclass(frozen=True)
class _Dealing:
    """A site under a mode: rows and heads of each rank while it attends."""

    site: Site
    ways: Ways
    _rows: dict[int, IntArray] = field(default_factory=dict[int, IntArray], compare=False)
    _keys: dict[int, IntArray] = field(default_factory=dict[int, IntArray], compare=False)

    @cached_property
    def degree(self) -> int:
        """Ranks to which heads are dealt."""
        return self.site.mesh.span(self.ways.ulysses)

    @cached_property
    def kv_blocks(self) -> int:
        """Blocks into which key heads are cut; fewer than ranks where heads are fewer."""
        return min(self.degree, self.site.heads.kv)

    def rows(self, rank: int) -> IntArray:
        """Rows of the queries that a rank attends, increasing where heads are dealt."""
        if self.degree == 1:
            return self.site.rows(rank)
        first, *others = self.site.mesh.peers(self.ways.ulysses, rank)
        if first not in self._rows:
            held = [self.site.rows(peer) for peer in (first, *others)]
            self._rows[first] = np.sort(np.concatenate(held))
        return self._rows[first]

    def keys(self, rank: int) -> IntArray:
        """Rows of the keys that a rank has when it begins to attend."""
        if not self.ways.gather:
            return self.rows(rank)
        first, *_ = self.site.mesh.peers(self.ways.ulysses, rank)
        if first not in self._keys:
            self._keys[first] = seen_rows(self.rows(rank), self.site.segments, self.site.causal)
        return self._keys[first]

    def block(self, rank: int, blocks: int) -> int:
        """Which of so many blocks of heads a rank attends."""
        place = self.site.mesh.peers(self.ways.ulysses, rank).index(rank)
        return place * blocks // self.degree

    def bring(self, axes: tuple[str, ...], blocks: int, *, keys: bool) -> RowMove:
        """The move of queries, or of keys and values, to where they are attended."""
        mesh = self.site.mesh
        peers = mesh.peers(axes, mesh.rank)
        have = [blocked(self.site.rows(peer), blocks) for peer in peers]
        want = [
            (self.keys(peer) if keys else self.rows(peer)) * blocks + self.block(peer, blocks)
            for peer in peers
        ]
        return plan_row_move(have, want, axes, mesh, before=blocks)

    def back(self) -> RowMove:
        """The move of the result to where the queries came from."""
        mesh, axes, blocks = self.site.mesh, self.ways.ulysses, self.degree
        peers = mesh.peers(axes, mesh.rank)
        have = [self.rows(peer) * blocks + self.block(peer, blocks) for peer in peers]
        want = [blocked(self.site.rows(peer), blocks) for peer in peers]
        return plan_row_move(have, want, axes, mesh, after=blocks)

    def ring(self, overlap: bool) -> RingPlan:
        """The ring of keys and values."""
        mesh = self.site.mesh
        peers = mesh.peers(self.ways.ring, mesh.rank)
        rows = [self.rows(peer) for peer in peers]
        plan = plan_ring(rows, self.site.segments, self.site.causal, peers.index(mesh.rank))
        group = mesh.group(self.ways.ring) if any(plan.reach) else None
        return RingPlan(plan.me, plan.rows, plan.reach, plan.pairs, group, overlap)


def blocked(rows: IntArray, blocks: int) -> IntArray:
    """Rows, each cut into blocks of heads that count as rows of their own."""
    return (rows[:, None] * blocks + np.arange(blocks)).ravel()


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
    dealing = _Dealing(site, ways)
    if ways.ring:
        attended = dealing.ring(overlap)
    else:
        rank = site.mesh.rank
        rows, keys = dealing.rows(rank), dealing.keys(rank)
        attended = segment_runs(rows, keys, site.segments, site.causal)
    return Schedule(
        q=dealing.bring(ways.ulysses, dealing.degree, keys=False),
        kv=dealing.bring((*ways.gather, *ways.ulysses), dealing.kv_blocks, keys=True),
        back=dealing.back(),
        attended=attended,
        lead=site.lead,
        overlap=overlap,
        kernel=kernel,
    )
