"""Batches, read one step ahead by a background thread, and agreed upon by all ranks."""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from model.config import Config
from model.data.images import ImageError
from model.data.inputs import ModelInputs, build_inputs, images_touched, plan_step
from model.data.rows import RowError
from model.data.sample import Sample, SampleError, content_of, sample_facts
from vlshard import BoundPlan, SampleFacts, ShardError, StepHeader
from vlshard.comm import Group, exchange_bytes, on_rank, together
from vlshard.plan import FactTable, StepBoundaries, Told, deal_rows, make_headers, merge_told


class ImageInRowError(ValueError):
    """An image that fails where it is decoded, with the row that names it."""


DATA_ERRORS = (RowError, ImageError, ImageInRowError, SampleError, ShardError, OSError)
DECODERS = 2
# A row that cannot be used, where such rows are skipped: it keeps its place and has no tokens.
NOTHING = Sample(np.empty(0, np.int64), np.empty(0, np.int64))
POLL_SECONDS = 0.1

Source = tuple[Sample, Sequence[Path]]


@runtime_checkable
class Rows(Protocol):
    """Where samples come from, by row; reading a row decodes no image."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def row(self, index: int) -> Source:
        """The sample of a row and the paths of its images, in reading order."""
        ...

    def where(self, index: int) -> str:
        """Where a row is, for messages."""
        ...


@runtime_checkable
class Images(Protocol):
    """Where pixels come from."""

    def patches_of(self, paths: Sequence[Path]) -> list[Float[Tensor, "rows p"]]:
        """The patch rows of each image."""
        ...


@runtime_checkable
class Order(Protocol):
    """Which rows each step takes; see ``Reading``."""

    @property
    def done(self) -> int:
        """Steps that were done before."""
        ...

    @property
    def steps(self) -> int:
        """Number of steps."""
        ...

    @property
    def micro_batch(self) -> int | None:
        """Rows per data-parallel rank and forward; None is all of a step's."""
        ...

    def rows(self, step: int) -> tuple[int, ...]:
        """Rows of a step (counted from 0), in global order."""
        ...


@dataclass(frozen=True)
class Reading:
    """Which rows each step takes.

    Attributes:
      num_rows: rows of the data.
      batch: rows of a step, over all ranks and micro-batches.
      steps: number of steps.
      micro_batch: rows per data-parallel rank and forward; None is all of a step's.
      seed: of the order of rows, another one each time the data comes round.
      shuffle: whether to shuffle at all; else rows come in file order.
      done: steps that were done before.
      read: rows that they took; how many a step takes may have changed.
    """

    num_rows: int
    batch: int
    steps: int
    micro_batch: int | None = None
    seed: int = 0
    shuffle: bool = True
    done: int = 0
    read: int = 0

    def rows(self, step: int) -> tuple[int, ...]:
        """Rows of a step (counted from 0), in global order; data that ends starts again."""
        start = self._place(step)
        places = range(start, start + self.batch)
        return tuple(self._row(*divmod(place, self.num_rows)) for place in places)

    def state(self, steps: int) -> dict[str, int]:
        """How far the data is read after so many steps: whole passes, and rows of the next."""
        passes, rows = divmod(self._place(steps), self.num_rows)
        return {"passes": passes, "rows": rows}

    def after(self, steps: int, state: Mapping[str, int]) -> "Reading":
        """The reading that goes on where another one was after so many steps."""
        rows = min(state["rows"], self.num_rows)
        return replace(self, done=steps, read=state["passes"] * self.num_rows + rows)

    def _place(self, step: int) -> int:
        """Rows that were taken before a step (counted from 0)."""
        return self.read + (step - self.done) * self.batch

    def _row(self, epoch: int, place: int) -> int:
        return _order(self.num_rows, self.seed, epoch)[place] if self.shuffle else place


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The shuffled rows of one pass over the data."""
    return tuple(np.random.default_rng([seed, epoch]).permutation(num_rows).tolist())


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward pass of this rank: what all ranks know of it, its boundaries, its tensors."""

    header: StepHeader
    at: StepBoundaries
    inputs: ModelInputs


@dataclass(frozen=True, eq=False)
class Batch:
    """One step of this rank.

    Attributes:
      step: number of the step, from 1.
      parts: its micro-batches.
      vision_rows: patches that each rank pushes through the vision tower.
      text_rows: token positions, padding included, that each rank pushes through the decoder.
    """

    step: int
    parts: tuple[MicroBatch, ...]
    vision_rows: tuple[int, ...]
    text_rows: tuple[int, ...]

    @property
    def skipped(self) -> tuple[int, ...]:
        """Rows that could not be used, and so have no tokens."""
        tables = [part.header.table for part in self.parts]
        rows = [table.numbers[table.tokens == 0, 0].tolist() for table in tables]
        return tuple(row for part in rows for row in part)

    @property
    def headers(self) -> tuple[StepHeader, ...]:
        """Headers of the micro-batches."""
        return tuple(part.header for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of all ranks, without padding."""
        return sum(int(part.header.table.tokens.sum()) for part in self.parts)

    @property
    def labels(self) -> int:
        """Labelled tokens of all ranks."""
        return sum(int(part.header.table.labelled.sum()) for part in self.parts)

    @property
    def images(self) -> int:
        """Images (or videos) of all ranks."""
        return sum(len(part.header.table.grids) for part in self.parts)


class Loader:
    """Iterates over batches; a context manager that ends its thread.

    ``faults`` are those of the rows that this rank has skipped, by row.

    Each step the thread reads the rows of its data-parallel rank, tells the others what is in
    them, and decodes the images that the plan gives this rank rows of. What goes wrong on any
    rank is raised on all of them at the step to which it belongs, with one text.
    """

    def __init__(
        self,
        reading: Order,
        rows: Rows,
        images: Images,
        config: Config,
        bound: BoundPlan,
        group: Group = None,
        *,
        skip_bad: bool = False,
    ) -> None:
        """Start reading.

        Args:
          reading: which rows each step takes.
          rows: the data.
          images: where pixels come from.
          config: of the model.
          bound: the plan, bound to the model and this world.
          group: a gloo group of all ranks that nothing else uses; None without other ranks.
          skip_bad: whether a row that cannot be used is read as one without tokens; then images
            are decoded where their row is read, too, to know.
        """
        self.faults: dict[int, str] = {}
        self._skip_bad = skip_bad
        self._reading, self._rows, self._images = reading, rows, images
        self._config, self._bound, self._group = config, bound, group
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=1)
        self._stop = threading.Event()
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")
        self._thread = threading.Thread(target=self._work, name="loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        """One batch a step.

        Raises: AgreedError on every rank where data is bad on any.
        """
        for _ in range(self._reading.done, self._reading.steps):
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stop reading; a thread that waits for other ranks is left behind, it is a daemon."""
        self._stop.set()
        self._thread.join(timeout=1.0)
        self._decoders.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        """Load step after step; an error is the last item."""
        try:
            for step in range(self._reading.done, self._reading.steps):
                self._put(self._load(step))
                if self._stop.is_set():
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: Batch | BaseException) -> None:
        """Wait until the consumer has taken what came before, or wants no more."""
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue

    def _load(self, step: int) -> Batch:
        """One batch; every rank takes part in every exchange."""
        ids, ranks = self._reading.rows(step), self._bound.data_ranks
        deal = deal_rows(len(ids), ranks, self._reading.micro_batch)
        mine = [offset for piece in deal for offset, home in piece if home == self._bound.data_rank]
        sources, told, surprise = self._read(ids, mine)
        messages = exchange_bytes(told.pack(), self._group)
        with together(*DATA_ERRORS, group=self._group):
            if surprise is not None:
                raise surprise
            facts = merge_told(messages, len(ids))
            headers = make_headers(facts, ranks, self._reading.micro_batch)
            made = [
                self._build(header, [ids[offset] for offset, _ in piece], sources)
                for header, piece in zip(headers, deal, strict=True)
            ]
        parts = tuple(
            MicroBatch(header, *plan_step(self._bound, header, inputs))
            for header, inputs in zip(headers, made, strict=True)
        )
        counts = [self._bound.row_counts(header) for header in headers]
        vision, text = (tuple(sum(rows).tolist()) for rows in zip(*counts, strict=True))
        return Batch(step + 1, parts, vision, text)

    def _read(
        self, ids: Sequence[int], mine: Sequence[int]
    ) -> tuple[Mapping[int, Source], Told, Exception | None]:
        """Read this rank's rows: by row id, what the others are told, and an unexpected error."""
        sources: dict[int, Source] = {}
        try:
            facts = [self._read_row(ids[offset], sources) for offset in mine]
        except Exception as caught:
            return {}, Told(np.empty(0, np.int64), FactTable.of([]), on_rank(caught)), caught
        return sources, Told(np.array(mine, np.int64), FactTable.of(facts)), None

    def _read_row(self, row: int, sources: dict[int, Source]) -> SampleFacts:
        """Read one row into ``sources``; a bad row is told by the error in its facts."""
        try:
            sources[row] = self._rows.row(row)
            if self._skip_bad:
                self._decode([(row, path) for path in sources[row][1]])
            facts = sample_facts(sources[row][0], row, self._config)
        except DATA_ERRORS as error:
            facts = SampleFacts(row=row, tokens=0, labelled=0, error=str(error))
        if facts.error is None or not self._skip_bad:
            return facts
        self.faults[row], sources[row] = facts.error, (NOTHING, ())
        return SampleFacts(row=row, tokens=0, labelled=0, content=content_of(NOTHING))

    def _build(
        self, header: StepHeader, ids: Sequence[int], sources: Mapping[int, Source]
    ) -> ModelInputs:
        """Decode what this rank's share touches and build its tensors."""
        share = self._bound.share(header, self._bound.mesh.here)
        touched = images_touched(header, share.patches)
        wanted = {*np.unique(share.samples).tolist(), *(sample for sample, _ in touched)}
        rows = {
            i: sources.get(ids[i]) or self._read_again(ids[i], header.samples[i].content)
            for i in sorted(wanted)
        }
        found = [(ids[sample], rows[sample][1][item]) for sample, item in touched]
        parts = [found[k::DECODERS] for k in range(DECODERS)]
        decoded = list(self._decoders.map(self._decode, parts))
        pixels = {item: decoded[k % DECODERS][k // DECODERS] for k, item in enumerate(touched)}
        samples = {i: sample for i, (sample, _) in rows.items()}
        return build_inputs(header, share, samples, pixels, self._config)

    def _read_again(self, row: int, content: int) -> Source:
        """A row that another rank has read, with what it has found in it."""
        if content == content_of(NOTHING):
            return NOTHING, ()
        source = self._rows.row(row)
        if content_of(source[0]) != content:
            told = f"row {row} reads differently here than on the rank whose row it is"
            raise SampleError(f"{self._rows.where(row)}: {told}")
        return source

    def _decode(self, images: Sequence[tuple[int, Path]]) -> list[Float[Tensor, "rows p"]]:
        """Patches of images, given with their rows; a fault names the row."""
        try:
            return self._images.patches_of([path for _, path in images])
        except ImageError as error:
            row = next((row for row, path in images if str(path) == str(error.path)), None)
            if row is None:
                raise
            raise ImageInRowError(f"{self._rows.where(row)}: image {error}") from error
