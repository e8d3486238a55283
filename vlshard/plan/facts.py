"""Facts of samples: one as a record, many as a few arrays that read as a sequence of records."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import overload

import numpy as np

from vlshard.language import IntArray, ranges

Grid = tuple[int, int, int]
LabelRun = tuple[int, int]


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
      label_runs: (start, count) of each run of tokens whose label counts, after the shift by one;
        none where they have not been told.
      error: what is wrong with this sample, or None; every rank raises it.
      content: checksum of its ids, labels and grids, by which ranks that read one row know that
        they have read the same.
    """

    row: int
    tokens: int
    labelled: int
    grids: tuple[Grid, ...] = ()
    starts: tuple[int, ...] = ()
    label_runs: tuple[LabelRun, ...] = ()
    error: str | None = None
    content: int = 0

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each frame, one per placeholder run [patches before merging]."""
        return tuple((h, w) for t, h, w in self.grids for _ in range(t))


# Fields that are one integer a sample, and those that are lists of so many integers an entry.
NUMBERS = ("row", "tokens", "labelled", "content")
LISTS = {"grids": 3, "starts": 1, "label_runs": 2}


@dataclass(frozen=True, eq=False)
class FactTable(Sequence[SampleFacts]):
    """Facts of many samples as a few arrays; reads as a sequence of ``SampleFacts``.

    Attributes:
      numbers: one row a sample: the fields ``NUMBERS``.
      counts: one row a sample: how many entries it has of each of ``LISTS``.
      lists: the entries of each of ``LISTS``, of one sample after another, an entry a row.
      errors: what is wrong, by sample, where anything is.
    """

    numbers: IntArray
    counts: IntArray
    lists: tuple[IntArray, ...]
    errors: Mapping[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def of(cls, facts: Iterable[SampleFacts]) -> "FactTable":
        """The table of some samples; a table is taken as it is."""
        if isinstance(facts, FactTable):
            return facts
        given = list(facts)
        numbers = [(one.row, one.tokens, one.labelled, one.content) for one in given]
        counts = [(len(one.grids), len(one.starts), len(one.label_runs)) for one in given]
        lists = (
            chain.from_iterable(chain.from_iterable(one.grids for one in given)),
            chain.from_iterable(one.starts for one in given),
            chain.from_iterable(chain.from_iterable(one.label_runs for one in given)),
        )
        return cls(
            np.array(numbers, np.int64).reshape(-1, len(NUMBERS)),
            np.array(counts, np.int64).reshape(-1, len(LISTS)),
            tuple(
                np.fromiter(values, np.int64).reshape(-1, width)
                for values, width in zip(lists, LISTS.values(), strict=True)
            ),
            {i: one.error for i, one in enumerate(given) if one.error is not None},
        )

    @classmethod
    def joined(cls, tables: Sequence["FactTable"]) -> "FactTable":
        """The samples of several tables, one after another."""
        begins = np.cumsum([0, *map(len, tables)]).tolist()
        errors = {
            begin + i: text
            for begin, table in zip(begins, tables, strict=False)
            for i, text in table.errors.items()
        }
        return cls(
            np.concatenate([table.numbers for table in tables]),
            np.concatenate([table.counts for table in tables]),
            tuple(np.concatenate(parts) for parts in zip(*(t.lists for t in tables), strict=True)),
            errors,
        )

    def take(self, samples: IntArray) -> "FactTable":
        """Some samples, in the order given."""
        places = {int(i): place for place, i in enumerate(samples)} if self.errors else {}
        return FactTable(
            self.numbers[samples],
            self.counts[samples],
            tuple(
                values[ranges(ends[samples] - counts[samples], counts[samples])]
                for values, ends, counts in zip(
                    self.lists, self._ends.T, self.counts.T, strict=True
                )
            ),
            {places[i]: text for i, text in self.errors.items() if i in places},
        )

    @cached_property
    def _ends(self) -> IntArray:
        """Where the entries of each sample end in each of the lists."""
        return np.cumsum(self.counts, axis=0)

    @property
    def tokens(self) -> IntArray:
        """Tokens of each sample."""
        return self.numbers[:, NUMBERS.index("tokens")]

    @property
    def labelled(self) -> IntArray:
        """Tokens of each sample whose label counts."""
        return self.numbers[:, NUMBERS.index("labelled")]

    @property
    def grids(self) -> IntArray:
        """Grids of all samples."""
        return self.lists[0]

    @property
    def grid_counts(self) -> IntArray:
        """Images and videos of each sample."""
        return self.counts[:, 0]

    @cached_property
    def frames(self) -> IntArray:
        """(rows, columns) of each frame of all samples [patches before merging]."""
        return np.repeat(self.grids[:, 1:], self.grids[:, 0], axis=0)

    @cached_property
    def frame_counts(self) -> IntArray:
        """Frames of each sample."""
        frames = np.concatenate([[0], np.cumsum(self.grids[:, 0])])
        ends = self._ends[:, 0]
        return frames[ends] - frames[ends - self.grid_counts]

    @property
    def starts(self) -> IntArray:
        """Token offset of each placeholder run of all samples."""
        return self.lists[1][:, 0]

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> SampleFacts: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[SampleFacts]: ...

    def __getitem__(self, index: int | slice) -> SampleFacts | Sequence[SampleFacts]:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        at = range(len(self))[index]
        row, tokens, labelled, content = self.numbers[at].tolist()
        grids, starts, runs = (
            values[end - count : end].tolist()
            for values, end, count in zip(self.lists, self._ends[at], self.counts[at], strict=True)
        )
        return SampleFacts(
            row=row,
            tokens=tokens,
            labelled=labelled,
            grids=tuple((t, h, w) for t, h, w in grids),
            starts=tuple(start for (start,) in starts),
            label_runs=tuple((start, count) for start, count in runs),
            error=self.errors.get(at),
            content=content,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FactTable):
            return NotImplemented
        mine, theirs = ((table.numbers, table.counts, *table.lists) for table in (self, other))
        same = all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
        return same and dict(self.errors) == dict(other.errors)

    def __hash__(self) -> int:
        return hash(self.numbers.tobytes())
