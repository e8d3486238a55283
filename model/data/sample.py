"""One sample of the data, and the facts about it that every rank needs."""

from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from model.config import Config
from vlshard import SampleFacts
from vlshard.language import IntArray
from vlshard.plan import Grid, LabelRun

IGNORED = -100


class SampleError(ValueError):
    """A sample that cannot be trained on."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Tokens of one row of data, without padding.

    Attributes:
      ids: token ids, placeholders already expanded: one a visual token.
      labels: one a token, aligned with ids; -100 is ignored. Nothing predicts the first token, so
        its label is unused.
      grids: (frames, rows, columns) of each image or video in reading order [patches before
        merging]. A video of t frames has t placeholder runs, and one grid.
    """

    ids: IntArray
    labels: IntArray
    grids: tuple[Grid, ...] = ()

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.shape != self.labels.shape:
            shapes = f"{list(self.ids.shape)} and {list(self.labels.shape)}"
            raise SampleError(f"ids and labels must be two lists of one length, found {shapes}")

    @classmethod
    def from_padded(
        cls, ids: IntArray, attention_mask: NDArray, labels: IntArray, grids: tuple[Grid, ...] = ()
    ) -> "Sample":
        """A sample out of a padded row, whichever side the padding is on.

        Args:
          ids: token ids of the row.
          attention_mask: 1 or True where a token is no padding.
          labels: labels of the row, aligned with ids.
          grids: as in the sample.
        """
        real = np.asarray(attention_mask, dtype=bool)
        return cls(ids[real], labels[real], grids)


@dataclass(frozen=True, eq=False)
class Runs:
    """Placeholder runs of a row: neighbouring tokens with one visual id, in reading order.

    Attributes:
      starts: token offset of each run.
      lengths: tokens of each run.
      video: whether it is a run of video placeholders.
    """

    starts: IntArray
    lengths: IntArray
    video: NDArray[np.bool_]


def placeholder_runs(ids: IntArray, config: Config) -> Runs:
    """Find the runs of visual placeholders in a row of ids."""
    kind = np.where(ids == config.image_token_id, 1, 0)
    kind[ids == config.video_token_id] = 2
    changes = np.flatnonzero(np.diff(kind, prepend=0, append=0))
    edges = np.concatenate([changes, [len(ids)]])
    inside = np.flatnonzero(np.append(kind, 0)[changes])
    starts = changes[inside]
    return Runs(starts, edges[inside + 1] - starts, kind[starts] == 2)


def sample_facts(sample: Sample, row: int, config: Config) -> SampleFacts:
    """What all ranks are told of a sample.

    Args:
      sample: the sample.
      row: id of its row in the data, for messages.
      config: of the model: placeholder ids, merge unit, vocabulary.
    Returns: the facts; if the sample is bad they say so in ``error``, and hold no grids.
    """
    runs, content = placeholder_runs(sample.ids, config), content_of(sample)
    labelled = int(np.count_nonzero(sample.labels[1:] != IGNORED))
    fault = next(_faults(sample, runs, config), None)
    if fault is not None:
        return SampleFacts(
            row, len(sample.ids), labelled, error=f"row {row}: {fault}", content=content
        )
    starts = tuple(int(start) for start in runs.starts)
    labels = label_runs(sample)
    return SampleFacts(
        row, len(sample.ids), labelled, sample.grids, starts, labels, content=content
    )


def label_runs(sample: Sample) -> tuple[LabelRun, ...]:
    """(start, count) of each run of tokens whose next token's label counts."""
    counts = (sample.labels[1:] != IGNORED).astype(np.int64)
    edges = np.flatnonzero(np.diff(counts, prepend=0, append=0)).reshape(-1, 2)
    return tuple((start, stop - start) for start, stop in edges.tolist())


def content_of(sample: Sample) -> int:
    """Checksum of a sample's ids, labels and grids; 31 bits, as all numbers that ranks tell."""
    ids, labels = (np.ascontiguousarray(x, np.int64) for x in (sample.ids, sample.labels))
    found = crc32(labels.tobytes(), crc32(ids.tobytes()))
    return crc32(repr(sample.grids).encode(), found) & 0x7FFFFFFF


def _faults(sample: Sample, runs: Runs, config: Config) -> Iterator[str]:
    """What is wrong with a sample."""
    vocab = config.text.vocab_size
    if not len(sample.ids):
        yield "it has no tokens"
    for name, values in (("id", sample.ids), ("label", sample.labels)):
        outside = (values < 0) | (values >= vocab)
        if name == "label":
            outside &= values != IGNORED
        for at in np.flatnonzero(outside)[:1]:
            yield f"{name} {values[at]} of token {at} is outside of the vocabulary of {vocab}"
    merge = config.vision.spatial_merge_size
    for item, (t, h, w) in enumerate(sample.grids):
        if min(t, h, w) < 1 or h % merge or w % merge:
            yield f"grid {(t, h, w)} of item {item} is not made of {merge}x{merge} merge units"
            return
    yield from _placeholder_faults(sample.grids, runs, config)


def _placeholder_faults(grids: tuple[Grid, ...], runs: Runs, config: Config) -> Iterator[str]:
    """How the placeholders differ from what the grids ask for."""
    frames = [(item, grid) for item, grid in enumerate(grids) for _ in range(grid[0])]
    wanted = [grid[1] * grid[2] // config.unit for _, grid in frames]
    found = runs.lengths.tolist()
    total = (
        f"found {sum(found)} visual placeholder tokens in {len(found)} runs, expected "
        f"{sum(wanted)} in {len(wanted)}"
    )
    for (item, grid), want, have, video in zip(frames, wanted, found, runs.video, strict=False):
        if want != have:
            yield f"{total}: item {item} with grid {grid} has a run of {have} where {want} belong"
        elif grid[0] > 1 and not video:
            yield f"item {item} with grid {grid} has image placeholders, only a video has frames"
    if len(wanted) > len(found):
        item, grid = frames[len(found)]
        yield f"{total}: nothing is left for item {item} with grid {grid}"
    if len(found) > len(wanted):
        start = runs.starts[len(wanted)]
        yield f"{total}: the run at token {start} has no grid (grids: {list(grids)})"
