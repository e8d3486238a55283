"""Attention inside segments of a pack, on one device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vlshard.header import IntArray


class Batch(NamedTuple):
    """Runs of one shape, attended in one kernel call."""

    q_length: int
    k_length: int
    q_starts: IntArray
    k_starts: IntArray


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

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The runs grouped by shape; runs without a query are left out."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for q, nq, k, nk in zip(
            self.q_starts, self.q_lengths, self.k_starts, self.k_lengths, strict=True
        ):
            if nq:
                groups.setdefault((nq, nk), []).append((q, k))
        return tuple(
            Batch(nq, nk, *np.array(pairs, dtype=np.int64).T)
            for (nq, nk), pairs in groups.items()
        )

    @property
    def pairs(self) -> int:
        """Query-key pairs that are computed; what attention costs."""
        return sum(
            nq * nk - (nq * (nq - 1) // 2 if self.causal else 0)
            for nq, nk in zip(self.q_lengths, self.k_lengths, strict=True)
        )
