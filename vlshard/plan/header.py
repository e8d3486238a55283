"""What every rank knows of a micro-batch before it computes: numbers only, the same everywhere.

A header holds, per sample, its row id, its number of tokens and of labels, where its visual
placeholders start and the grids behind them. All layouts, paddings, label counts and data errors
are computed from it, so that no rank decides anything by what it alone can see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vlshard.language import IntArray
from vlshard.plan.facts import FactTable, Grid, SampleFacts

__all__ = ["Grid", "SampleFacts", "Share", "StepHeader", "deal_rows", "make_headers"]


@dataclass(frozen=True)
class StepHeader:
    """One micro-batch of all ranks.

    Attributes:
      samples: facts of each sample, in global order.
      home: data-parallel rank that reads each sample.
      num_labels: labelled tokens of the whole global batch, all its micro-batches together: what
        each token's loss is divided by.
    """

    samples: Sequence[SampleFacts]
    home: tuple[int, ...]
    num_labels: int

    @cached_property
    def table(self) -> FactTable:
        """The facts as a few arrays: what layouts are computed from."""
        return FactTable.of(self.samples)

    @cached_property
    def segments(self) -> tuple[int, ...]:
        """Patches of each frame of the micro-batch, in reading order."""
        return tuple(self.table.frames.prod(axis=1).tolist())

    @cached_property
    def segment_home(self) -> tuple[int, ...]:
        """Data-parallel rank that reads each frame."""
        homes = np.array(self.home, np.int64)
        return tuple(np.repeat(homes, self.table.frame_counts).tolist())

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.table.tokens.max(initial=0))

    @property
    def visual(self) -> bool:
        """Whether any sample of any rank has an image or a video."""
        return len(self.table.grids) > 0


def deal_rows(num_rows: int, ranks: int, micro_batch: int | None) -> list[list[tuple[int, int]]]:
    """Deal the rows of a global batch to data-parallel ranks, and cut them into micro-batches.

    Ranks take contiguous runs, sizes differing by at most one, larger ones first. Each rank cuts
    its run into pieces of ``micro_batch``; ranks with fewer pieces end with empty ones.

    Args:
      num_rows: rows of the global batch.
      ranks: number of data-parallel ranks.
      micro_batch: rows per rank and forward; None puts all of them into one.
    Returns: per micro-batch, the (row offset, data-parallel rank) pairs in global order.
    """
    size, extra = divmod(num_rows, ranks)
    longest = size + (extra > 0)
    piece = micro_batch or max(longest, 1)
    place = np.arange(num_rows)
    rank = np.where(
        place < extra * (size + 1), place // (size + 1), (place - extra) // max(size, 1)
    )
    turn = (place - rank * size - np.minimum(rank, extra)) // piece
    pieces = [np.flatnonzero(turn == number) for number in range(-(-max(longest, 1) // piece))]
    return [list(zip(rows.tolist(), rank[rows].tolist(), strict=True)) for rows in pieces]


def make_headers(
    facts: Sequence[SampleFacts], ranks: int, micro_batch: int | None = None
) -> tuple[StepHeader, ...]:
    """Headers of all micro-batches of one global batch.

    Args:
      facts: facts of the batch's rows, in global order.
      ranks: number of data-parallel ranks.
      micro_batch: rows per rank and forward; None puts all of them into one.
    Returns: one header a micro-batch, each with the label count of the whole batch.
    """
    table = FactTable.of(facts)
    num_labels = int(table.labelled.sum())
    return tuple(
        StepHeader(
            samples=table.take(np.array([offset for offset, _ in piece], np.int64)),
            home=tuple(rank for _, rank in piece),
            num_labels=num_labels,
        )
        for piece in deal_rows(len(table), ranks, micro_batch)
    )


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank holds of a micro-batch: global indices, in local order.

    Attributes:
      patches: rows of the patch pack (all frames of the micro-batch in reading order).
      samples: of which sample of the micro-batch each token is, [b, s]; a pack is one row.
      positions: which token of that sample it is, [b, s]; past the sample's end it is padding.
      visual: whether any rank holds a visual row (if not, all ranks skip the vision tower).
      copies: number of ranks that compute each of these tokens, and so share its loss.
      entered_patches: rows of the patch pack that this rank computes attention's inside on; None
        where these are its own.
      entered_tokens: samples and positions of the tokens likewise; None where these are its own.
    """

    patches: IntArray
    samples: IntArray
    positions: IntArray
    visual: bool
    copies: int = 1
    entered_patches: IntArray | None = None
    entered_tokens: tuple[IntArray, IntArray] | None = None
