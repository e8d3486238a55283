"""Rows of a JSON Lines file to samples: chat rows and pre-tokenised rows, read by number."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import numpy as np

from model.config import Config, json_text, odd_file, parse_json
from model.data.chat import ChatError, ChatTemplate
from model.data.image_names import NameFault, image_paths, kind_of
from model.data.images import ImageError, ImageReader
from model.data.sample import IGNORED, Sample, sample_facts
from vlshard.language import clipped, clipped_path
from vlshard.plan import Grid

CHAT_KEYS = ("messages", "images")
TOKEN_KEYS = ("input_ids", "labels", "images")
BOM = b"\xef\xbb\xbf"
ONE_A_LINE = "expected JSON Lines, one object a line"
FORMATS = (
    ((b"\xff\xfe", b"\xfe\xff"), "the data is UTF-16 or UTF-32, expected UTF-8"),
    ((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"), "the data is compressed: unpack it"),
    ((b"PAR1", b"ARROW1", b"PK\x03\x04"), f"the data is no text, {ONE_A_LINE}"),
    ((b"[",), f"the data is a JSON array, {ONE_A_LINE} (jq -c '.[]' makes it of one)"),
)


class RowError(ValueError):
    """A row of data that cannot be trained on.

    Attributes:
      path: the data file.
      line: its line, from 1; None if the fault is the file's.
      reason: what was found and what was expected.
    """

    def __init__(self, path: str | Path, line: int | None, reason: str):
        where = clipped_path(path) if line is None else f"{clipped_path(path)}:{line}"
        super().__init__(f"{where}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class RowFile:
    """A JSON Lines file whose rows are read when they are asked for.

    A chat row is ``{"messages": [{"role", "content"}], "images": [paths]}``: ``<image>`` in the
    text marks each image, the model folder's chat template applies, and what assistants say, with
    the end of their turns, is what is learned. A pre-tokenised row is ``{"input_ids", "labels",
    "images"}``: placeholders expanded, labels aligned with ids, -100 ignored. ``images`` may be
    left out or null; its paths are relative to the file. Both kinds may be mixed, blank lines are
    skipped. docs/data.md has it all. May be used by several threads at once.

    Args:
      path: the file.
      folder: Hugging Face model folder, for its tokenizer and chat template.
      config: config of the model.
      images: reads the sizes of the rows' images.
    Raises: RowError if the file cannot be read, is no text of rows, or has none.
    """

    def __init__(self, path: str | Path, folder: str | Path, config: Config, images: ImageReader):
        self.path = Path(path)
        self.config = config
        self.images = images
        self._template = ChatTemplate(folder, config)
        rows = self._index()
        self._starts, self._lines = (np.array([row[k] for row in rows], np.int64) for k in (0, 1))
        self._sums = np.array([row[2] for row in rows], np.uint32)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def fingerprint(self) -> str:
        """Checksum of all rows in their order, as the file was when it was opened."""
        return f"{crc32(self._sums.tobytes()):08x}"

    def where(self, index: int) -> str:
        """File and line of a row, for messages."""
        return f"{clipped_path(self.path)}:{self._lines[index]}"

    def row(self, index: int) -> tuple[Sample, tuple[Path, ...]]:
        """Read one row; images are looked at but not decoded.

        Args:
          index: number of the row, from 0, blank lines not counted.
        Returns: the sample and its image files, in reading order.
        Raises: RowError naming file and line, what was found and what was expected.
        """
        line = int(self._lines[index])
        row = self._parse(index, line)
        paths = self._image_paths(row, line)
        try:
            grids = tuple(self.images.grid(path) for path in paths)
        except ImageError as error:
            self._fail(line, f"image {error}", error)
        sample = self._sample(row, line, grids)
        fault = sample_facts(sample, index, self.config).error
        if fault is not None:
            self._fail(line, fault)
        return sample, paths

    def learned(self, index: int) -> tuple[int, int, str | None]:
        """What is learned of a row.

        Args:
          index: number of the row.
        Returns: its tokens, how many of them are learned, and these as text where the model's
          folder has a tokenizer.
        Raises: RowError as ``row`` does.
        """
        sample, _ = self.row(index)
        labels = sample.labels[1:]
        wanted = labels[labels != IGNORED]
        return len(sample.ids), len(wanted), self._template.text(wanted)

    def _index(self) -> list[tuple[int, int, int]]:
        """Offset, line and checksum of every row."""
        rows: list[tuple[int, int, int]] = []
        start = 0
        try:
            odd = odd_file(self.path)
            if odd is not None:
                self._fail(None, f"{odd}: rows are read again and in any order")
            with open(self.path, "rb") as file:
                for line, text in enumerate(file, start=1):
                    if text.removeprefix(BOM).strip():
                        rows.append((start, line, crc32(text)))
                    start += len(text)
                    if len(rows) == 1 and rows[0][1] == line:
                        self._refuse_format(text.removeprefix(BOM).lstrip())
        except OSError as error:
            self._fail(None, f"the data file cannot be read: {error.strerror}", error)
        if not rows:
            self._fail(None, "the data is empty: found no rows, expected one JSON object a line")
        return rows

    def _refuse_format(self, text: bytes) -> None:
        """Refuse a file that begins like one of another format."""
        for marks, reason in FORMATS:
            if text.startswith(marks):
                self._fail(None, reason)

    def _parse(self, index: int, line: int) -> dict[str, Any]:
        """The row's JSON object, with known keys only."""
        with open(self.path, "rb") as file:
            file.seek(int(self._starts[index]))
            data = file.readline()
        if crc32(data) != self._sums[index]:
            self._fail(line, "the data file was written to since it was opened: start again")
        try:
            text = data.decode("utf-8-sig")
            row = parse_json(text)
        except UnicodeDecodeError as error:
            self._fail(line, f"not UTF-8: {error.reason} at byte {error.start}", error)
        except (ValueError, RecursionError) as error:
            open_end = getattr(error, "pos", None) == len(text)
            hint = ": the row ends early, a row is one line" if open_end else ""
            self._fail(line, f"broken JSON: {error}{hint}", error)
        if not isinstance(row, dict):
            self._fail(line, f"found {kind_of(row)}, expected a JSON object")
        for keys in (CHAT_KEYS, TOKEN_KEYS):
            if set(row) <= set(keys) and set(row) >= set(keys) - {"images"}:
                return row
        self._fail(
            line,
            f"found keys {clipped(list(row))}, expected {list(CHAT_KEYS)} or {list(TOKEN_KEYS)} "
            "(images may be left out)",
        )

    def _image_paths(self, row: dict[str, Any], line: int) -> tuple[Path, ...]:
        """The row's image files, relative to the data file."""
        try:
            return image_paths(row.get("images"), self.path.parent)
        except NameFault as error:
            self._fail(line, str(error), error)

    def _sample(self, row: dict[str, Any], line: int, grids: tuple[Grid, ...]) -> Sample:
        """Ids and labels of either kind of row."""
        if "messages" in row:
            try:
                return self._template.sample(row["messages"], grids)
            except ChatError as error:
                self._fail(line, str(error), error)
        ids, labels = row["input_ids"], row["labels"]
        for name, values in (("input_ids", ids), ("labels", labels)):
            fault = _integer_fault(values)
            if fault is not None:
                self._fail(line, f"{name}: {fault}")
        if len(ids) != len(labels):
            found = f"found {len(ids)} input_ids and {len(labels)} labels"
            self._fail(line, f"{found}, expected one label a token")
        if self.config.video_token_id in ids:
            at = ids.index(self.config.video_token_id)
            self._fail(
                line,
                f"token {at} is the placeholder of videos ({ids[at]}), expected that of images "
                f"({self.config.image_token_id}): videos are not read from files",
            )
        return Sample(np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64), grids)

    def _fail(self, line: int | None, reason: str, cause: Exception | None = None) -> NoReturn:
        raise RowError(self.path, line, reason) from cause


def _integer_fault(values: Any) -> str | None:
    """Why something is no list of token ids or labels, or None."""
    if not isinstance(values, list):
        return f"found {kind_of(values)}, expected a list of integers"
    odd: Sequence[Any] = [v for v in values if type(v) is not int or not -(2**63) <= v < 2**63]
    return f"found {json_text(odd[0])}, expected integers" if odd else None
