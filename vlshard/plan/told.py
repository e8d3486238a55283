"""What a rank tells the others of a step before it is computed: a few integers a row, and errors.

A message is integers and, behind them, the text of errors. It begins with a mark of the format, the
checksum of all that follows and how many there are of everything, so that what is cut off, garbled
or of another version is an error for whoever reads it, before anything is made of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from zlib import crc32

import numpy as np

from vlshard.comm import AgreedError, raise_any
from vlshard.language import IntArray
from vlshard.plan.facts import LISTS, NUMBERS, FactTable

MARK = 0x766C736861726401
LARGEST = 2**31 - 1  # of any number but an id; sums of those of a step stay below 2**63
HEAD = 2 + 2 + len(LISTS)  # mark, checksum, samples, errors, entries of each list
RANK = -1  # in place of a sample: an error of the rank as a whole


class Garbled(ValueError):
    """A message that says no facts."""


@dataclass(frozen=True, eq=False)
class Told:
    """What one rank tells.

    Attributes:
      offsets: place in the global batch of each of its samples.
      facts: of these samples.
      fault: what keeps this rank from going on, or None.
    """

    offsets: IntArray
    facts: FactTable
    fault: str | None = None

    def pack(self) -> bytes:
        """The message."""
        errors = {**({} if self.fault is None else {RANK: self.fault}), **self.facts.errors}
        texts = [text.encode(errors="replace") for text in errors.values()]
        entries = [len(values) for values in self.facts.lists]
        rest = np.concatenate(
            [
                [len(self.facts), len(errors), *entries],
                self.offsets,
                *(x.ravel() for x in (self.facts.numbers, self.facts.counts, *self.facts.lists)),
                list(errors),
                [len(text) for text in texts],
            ]
        ).astype("<i8")
        body = rest.tobytes() + b"".join(texts)
        return np.array([MARK, crc32(body)], "<i8").tobytes() + body

    @classmethod
    def unpack(cls, data: bytes) -> "Told":
        """What a message says.

        Raises: Garbled if it is not one, or says what cannot be.
        """
        words = np.frombuffer(data[: len(data) // 8 * 8], "<i8").astype(np.int64)
        if words.size < HEAD or words[0] != MARK or words[1] != crc32(data[16:]):
            raise Garbled("it is cut off, garbled or of another version")
        samples, errors, *entries = words[2:HEAD].tolist()
        shapes = [
            (samples,),
            (samples, len(NUMBERS)),
            (samples, len(LISTS)),
            *zip(entries, LISTS.values(), strict=True),
            (errors,),
            (errors,),
        ]
        if min(samples, errors, *entries) < 0 or HEAD + sum(map(prod, shapes)) > words.size:
            raise Garbled("it has fewer numbers than it counts")
        ends = np.cumsum([HEAD, *map(prod, shapes)]).tolist()
        offsets, numbers, counts, *lists, at, sizes = (
            words[start:end].reshape(shape)
            for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
        )
        texts = _texts(data[8 * ends[-1] :], at, sizes, samples)
        fault = texts.pop(RANK, None)
        facts = FactTable(numbers, counts, tuple(lists), texts)
        _check(facts)
        return cls(offsets, facts, fault)


def _texts(data: bytes, at: IntArray, sizes: IntArray, samples: int) -> dict[int, str]:
    """Errors by sample."""
    inside = bool(((at >= RANK) & (at < samples) & (sizes >= 0) & (sizes <= len(data))).all())
    if not inside or int(sizes.sum()) != len(data):
        raise Garbled("its errors are of no sample or of another length")
    ends = np.cumsum(sizes).tolist()
    return {
        sample: data[end - size : end].decode(errors="replace")
        for sample, end, size in zip(at.tolist(), ends, sizes.tolist(), strict=True)
    }


def _check(facts: FactTable) -> None:
    """Refuse numbers of which no batch could be made."""
    counts, (grids, starts, runs) = facts.counts, facts.lists
    if (counts < 0).any() or (counts > LARGEST).any():
        raise Garbled("a sample has a number of entries that cannot be")
    if [len(values) for values in facts.lists] != counts.sum(axis=0).tolist():
        raise Garbled("its samples have more or fewer entries than there are")
    numbers = (facts.numbers[:, 1:], grids, starts, runs)
    if any(x.size and not 0 <= x.min() <= x.max() <= LARGEST for x in numbers):
        raise Garbled(f"a number is below 0 or above {LARGEST}")
    if grids.size and (grids.min() < 1 or int(grids[:, 0].sum()) != len(starts)):
        raise Garbled("its grids have other frames than it has placeholder runs")
    if not np.array_equal(facts.frame_counts, counts[:, 1]):
        raise Garbled("a sample has other frames than placeholder runs")
    if (facts.frames.prod(axis=1) > LARGEST).any():
        raise Garbled(f"a frame has more than {LARGEST} patches")
    tokens = facts.tokens
    runs_within = (runs.sum(axis=1) <= np.repeat(tokens, counts[:, 2])).all()
    if not runs_within or (starts[:, 0] >= np.repeat(tokens, counts[:, 1])).any():
        raise Garbled("a run begins or ends behind the last token")
    if (facts.labelled > tokens).any():
        raise Garbled("a sample has more labels than tokens")


def merge_told(messages: Sequence[bytes], batch: int) -> FactTable:
    """The facts of a global batch, from what all ranks have told.

    Args:
      messages: one a rank, in rank order.
      batch: rows of the batch.
    Returns: the facts of each row, in global order.
    Raises: AgreedError with the same text on all ranks if a rank could not go on, a row is bad, a
      message is none, ranks that read the same row found different things in it, or a row was told
      by nobody.
    """
    told = [_read(rank, data) for rank, data in enumerate(messages)]
    raise_any([one.fault for one in told])
    facts = FactTable.joined([one.facts for one in told])
    offsets = np.concatenate([one.offsets for one in told])
    outside = np.flatnonzero((offsets < 0) | (offsets >= batch))
    if outside.size:
        raise AgreedError(f"row {offsets[outside[0]]} was told of a batch of {batch} rows")
    first = np.full(batch, offsets.size)
    np.minimum.at(first, offsets, np.arange(offsets.size))
    if missing := np.flatnonzero(first == offsets.size).tolist():
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise AgreedError(f"no rank has read these rows of the batch of {batch}: {listed}")
    ranks = np.repeat(np.arange(len(told)), [one.offsets.size for one in told])
    _refuse_unlike(facts, first[offsets], ranks)
    merged = facts.take(first)
    raise_any([merged.errors[i] for i in sorted(merged.errors)])
    return merged


def _read(rank: int, data: bytes) -> Told:
    """What a rank has told."""
    try:
        return Told.unpack(data)
    except Garbled as fault:
        raise AgreedError(f"what rank {rank} tells of its rows cannot be read: {fault}") from fault


def _refuse_unlike(facts: FactTable, first: IntArray, ranks: IntArray) -> None:
    """Rows that several ranks have read are the same everywhere."""
    again = np.flatnonzero(first != np.arange(first.size))
    if facts.take(again) == facts.take(first[again]):
        return
    for at in again.tolist():
        if facts[at] != (other := facts[int(first[at])]):
            text = f"row {facts[at].row} reads differently on rank {ranks[at]} than on a lower rank"
            raise AgreedError(f"{text}: {facts[at]} and {other}")
