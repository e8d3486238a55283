"""What every rank knows of a micro-batch before it computes: numbers only, the same everywhere.

A header holds, per sample, its row id, its number of tokens and of labels, where its visual
placeholders start and the grids behind them. All layouts, paddings, label counts and data errors
are computed from it, so that no rank decides anything by what it alone can see.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlshard.language import IntArray

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class SampleFacts:
    """One sample, in numbers.

    Attributes:
      row: id of the row in the data.
      tokens: number of tokens, without padding.
      labelled: number of tokens whose label counts, after the shift by one.
      grids: (frames, rows, columns) of each image or video in reading order [patches before
        merging].
      starts: token offset of each placeholder run in reading order; a run is one frame, so an
        item with t frames has t runs.
      error: what is wrong with this sample, or None; every rank raises it.
    """

    row: int
    tokens: int
    labelled: int
    grids: tuple[Grid, ...] = ()
    starts: tuple[int, ...] = ()
    error: str | None = None

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each frame, one per placeholder run [patches before merging]."""
        return tuple((h, w) for t, h, w in self.grids for _ in range(t))


@dataclass(frozen=True)
class StepHeader:
    """One micro-batch of all ranks.

    Attributes:
      samples: facts of each sample, in global order.
      home: data-parallel rank that reads each sample.
      num_labels: labelled tokens of the whole global batch, all its micro-batches together: what
        each token's loss is divided by.
    """

    samples: tuple[SampleFacts, ...]
    home: tuple[int, ...]
    num_labels: int

    @property
    def segments(self) -> tuple[int, ...]:
        """Patches of each frame of the micro-batch, in reading order."""
        return tuple(h * w for sample in self.samples for h, w in sample.frames)

    @property
    def segment_home(self) -> tuple[int, ...]:
        """Data-parallel rank that reads each frame."""
        pairs = zip(self.samples, self.home, strict=True)
        return tuple(home for sample, home in pairs for _ in sample.frames)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max((sample.tokens for sample in self.samples), default=0)

    @property
    def visual(self) -> bool:
        """Whether any sample of any rank has an image or a video."""
        return any(sample.grids for sample in self.samples)


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
    lengths = [size + (rank < extra) for rank in range(ranks)]
    offsets = [sum(lengths[:rank]) for rank in range(ranks)]
    piece = micro_batch or max(lengths[0], 1)
    return [
        [
            (offsets[rank] + i, rank)
            for rank in range(ranks)
            for i in range(start, min(start + piece, lengths[rank]))
        ]
        for start in range(0, max(lengths[0], 1), piece)
    ]


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
    num_labels = sum(sample.labelled for sample in facts)
    return tuple(
        StepHeader(
            samples=tuple(facts[offset] for offset, _ in piece),
            home=tuple(rank for _, rank in piece),
            num_labels=num_labels,
        )
        for piece in deal_rows(len(facts), ranks, micro_batch)
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
    """

    patches: IntArray
    samples: IntArray
    positions: IntArray
    visual: bool
    copies: int = 1


def whole_share(header: StepHeader) -> Share:
    """The share of a process that holds everything: rows padded to the longest sample."""
    samples, positions = np.indices((len(header.samples), header.longest))
    return Share(np.arange(sum(header.segments)), samples, positions, header.visual)
