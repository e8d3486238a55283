"""Attention inside segments of a pack, on one device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import einops
import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from vlshard.comm import Index
from vlshard.language import IntArray


@dataclass(frozen=True, eq=False)
class Windows:
    """Equally long stretches of rows, read as one batch."""

    starts: IntArray
    length: int
    _on_device: dict[torch.device, Tensor] = field(
        default_factory=dict[torch.device, Tensor], init=False, repr=False
    )

    @cached_property
    def joined(self) -> bool:
        """Whether each window begins where the one before it ends."""
        return bool(np.all(np.diff(self.starts) == self.length))

    @cached_property
    def rows(self) -> IntArray:
        """Every row of every window, in order."""
        return (self.starts[:, None] + np.arange(self.length)).ravel()

    def index(self, device: torch.device) -> Int[Tensor, " n"]:
        """The rows as a tensor on the device, sent there once."""
        return self.as_index.on(device)

    @property
    def as_index(self) -> Index:
        """The rows, and their copies on devices."""
        return Index(self.rows, self._on_device)

    def take(self, x: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "b l ..."]:
        """The rows of all windows: a view where the windows lie side by side, else a copy."""
        first, total = int(self.starts[0]), len(self.starts) * self.length
        if self.joined:
            rows = x[first : first + total]
        else:
            rows = x.index_select(0, self.index(x.device))
        return rows.reshape(len(self.starts), self.length, *x.shape[1:])


class Batch(NamedTuple):
    """Runs of one shape, attended in one kernel call."""

    q: Windows
    k: Windows


@dataclass(frozen=True)
class Runs:
    """Which keys each run of queries sees; host integers only.

    Attributes:
      q_starts: first query row of each run.
      q_lengths: query rows of each run.
      k_starts: first key row of each run.
      k_lengths: key rows of each run.
      causal: if set, query i of a run sees its first ``i + 1 + k_length - q_length`` keys (the
        last query sees all of them); otherwise every query sees every key.
    """

    q_starts: tuple[int, ...]
    q_lengths: tuple[int, ...]
    k_starts: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool = False

    @classmethod
    def segments(cls, lengths: Sequence[int], *, causal: bool = False) -> "Runs":
        """Whole segments, one after another, each seeing itself."""
        ends = np.cumsum([0, *lengths], dtype=np.int64)
        starts = tuple(int(end) for end in ends[:-1])
        sizes = tuple(int(length) for length in lengths)
        return cls(starts, sizes, starts, sizes, causal)

    @classmethod
    def causal_rows(cls, rows: int, length: int) -> "Runs":
        """Rows of a batch one after another, each seeing itself causally."""
        return cls.segments([length] * rows, causal=True)

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The runs grouped by shape; runs without a query are left out."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for q, nq, k, nk in zip(
            self.q_starts, self.q_lengths, self.k_starts, self.k_lengths, strict=True
        ):
            if nq:
                groups.setdefault((nq, nk), []).append((q, k))
        batches: list[Batch] = []
        for (nq, nk), pairs in groups.items():
            q_starts, k_starts = np.array(pairs, dtype=np.int64).T
            batches.append(Batch(Windows(q_starts, nq), Windows(k_starts, nk)))
        return tuple(batches)

    @cached_property
    def q_cut(self) -> list[int] | None:
        """Queries of each batch, if the batches lie one after another in the order of q."""
        return _cut([batch.q for batch in self.batches])

    @cached_property
    def k_cut(self) -> list[int] | None:
        """Keys of each batch, if the batches lie one after another in the order of k."""
        return _cut([batch.k for batch in self.batches])

    @cached_property
    def restore(self) -> Windows | None:
        """Where each query's result lies in the batches' order; None if they keep the order."""
        rows = [batch.q.rows for batch in self.batches]
        order = np.concatenate([np.empty(0, np.int64), *rows])
        return None if self.q_cut is not None else Windows(np.argsort(order), 1)

    @cached_property
    def packed_keys(self) -> Windows:
        """The key rows of every run, one run after another."""
        windows = zip(self.k_starts, self.k_lengths, strict=True)
        rows = [np.empty(0, np.int64), *(start + np.arange(n) for start, n in windows)]
        return Windows(np.concatenate(rows), 1)

    @cached_property
    def q_ends(self) -> Windows:
        """0, and where each run of queries ends."""
        return Windows(np.cumsum([0, *self.q_lengths]), 1)

    @cached_property
    def k_ends(self) -> Windows:
        """0, and where each run of packed keys ends."""
        return Windows(np.cumsum([0, *self.k_lengths]), 1)

    def indices(self, packed: bool) -> list[Index]:
        """What attention to the runs indexes tensors by.

        Args:
          packed: whether a kernel takes all runs in one call; else those of a shape go together.
        """
        if packed:
            return [x.as_index for x in (self.packed_keys, self.q_ends, self.k_ends)]
        windows = [w for batch in self.batches for w in batch if not w.joined]
        return [x.as_index for x in (*windows, *([self.restore] if self.restore else []))]

    @property
    def pairs(self) -> int:
        """Query-key pairs that are computed; what attention costs."""
        return sum(
            nq * nk - (nq * (nq - 1) // 2 if self.causal else 0)
            for nq, nk in zip(self.q_lengths, self.k_lengths, strict=True)
        )


def _cut(windows: Sequence[Windows]) -> list[int] | None:
    """Rows of each of some windows, if all of them lie one after another from the first row on."""
    rows = [np.empty(0, np.int64), *(each.rows for each in windows)]
    order = np.concatenate(rows)
    in_order = np.array_equal(order, np.arange(len(order)))
    return [len(each.rows) for each in windows] if in_order else None


def _batches_of(
    x: Shaped[Tensor, "n h d"], windows: Sequence[Windows], cut: list[int] | None
) -> Sequence[Shaped[Tensor, "_ l h d"]]:
    """The rows of each batch; views where the batches cut x, whose gradients are one then."""
    if cut is None or sum(cut) != len(x):
        return [each.take(x) for each in windows]
    parts: Sequence[Tensor] = torch.split(x, cut)
    shapes = [(len(each.starts), each.length, *x.shape[1:]) for each in windows]
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def segmented_attention(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "nk kv d"],
    v: Float[Tensor, "nk kv d"],
    runs: Runs,
) -> Float[Tensor, "n h d"]:
    """Attention of each run of queries to its own keys, softmax(q k / sqrt(d)) v.

    Runs of equal shape go through one kernel call. No run, no kernel: the result then has no
    rows, and all three inputs still get (zero) gradients.

    Args:
      q: queries; each row belongs to exactly one run.
      k: keys; query head i reads key head ``i * kv // h``.
      v: values.
      runs: which keys each run of queries sees.
    Returns: one row per query, in the order of q and its dtype.
    Raises: ValueError if the runs do not cover the queries.
    """
    if sum(runs.q_lengths) != q.shape[0]:
        raise ValueError(f"runs of {sum(runs.q_lengths)} queries for {q.shape[0]} rows of q")
    if not any(batch.k.length for batch in runs.batches):
        heads, width = q.shape[1:]
        none = (x[:0].reshape(0, heads, width) for x in (q, k, v))
        return torch.cat([torch.zeros_like(q), *none])
    keys = [batch.k for batch in runs.batches]
    parts = zip(
        _batches_of(q, [batch.q for batch in runs.batches], runs.q_cut),
        _batches_of(k, keys, runs.k_cut),
        _batches_of(v, keys, runs.k_cut),
        strict=True,
    )
    out = torch.cat([_attend_batch(*part, runs.causal) for part in parts])
    if runs.restore is None:
        return out
    return out.index_select(0, runs.restore.index(q.device))


def _attend_batch(
    q: Float[Tensor, "b l h d"],
    k: Float[Tensor, "b lk kv d"],
    v: Float[Tensor, "b lk kv d"],
    causal: bool,
) -> Float[Tensor, "_ h d"]:
    """The rows of one batch of runs, in the batch's order."""
    nq, nk = q.shape[1], k.shape[1]
    if nk == 0:
        return einops.rearrange(torch.zeros_like(q), "b l h d -> (b l) h d")
    groups = q.shape[2] // k.shape[2]
    square = nq == nk
    mask = None
    if causal and not square:
        mask = torch.ones(nq, nk, dtype=torch.bool, device=q.device).tril(nk - nq)
    out = F.scaled_dot_product_attention(
        einops.rearrange(q, "b l h d -> b h l d"),
        einops.repeat(k, "b l kv d -> b (kv g) l d", g=groups),
        einops.repeat(v, "b l kv d -> b (kv g) l d", g=groups),
        attn_mask=mask,
        is_causal=causal and square,
    )
    return einops.rearrange(out, "b h l d -> (b l) h d")
