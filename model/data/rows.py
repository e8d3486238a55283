"""Rows of a JSON Lines file to samples: chat rows and pre-tokenised rows, read by number."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from model.config import Config
from model.data.chat import ChatError, ChatTemplate
from model.data.images import ImageError, ImageReader
from model.data.sample import Sample, sample_facts
from vlshard.plan import Grid

CHAT_KEYS = ("messages", "images")
TOKEN_KEYS = ("input_ids", "labels", "images")


class RowError(ValueError):
    """A row of data that cannot be trained on.

    Attributes:
      path: the data file.
      line: its line, from 1; None if the fault is the file's.
      reason: what was found and what was expected.
    """

    def __init__(self, path: str | Path, line: int | None, reason: str):
        super().__init__(f"{path}: {reason}" if line is None else f"{path}:{line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class RowFile:
    """A JSON Lines file whose rows are read when they are asked for.

    A chat row is ``{"messages": [{"role", "content"}], "images": [paths]}``: ``<image>`` in the
    text marks each image, the model folder's chat template applies, and what assistants say, with
    the end of their turns, is what is learned. A pre-tokenised row is ``{"input_ids", "labels",
    "images"}``: placeholders expanded, labels aligned with ids, -100 ignored. ``images`` may be
    left out; its paths are relative to the file. Both kinds may be mixed, blank lines are skipped.
    May be used by several threads at once.

    Args:
      path: the file.
      folder: Hugging Face model folder, for its tokenizer and chat template.
      config: config of the model.
      images: reads the sizes of the rows' images.
    Raises: RowError if the file cannot be read or has no rows.
    """

    def __init__(self, path: str | Path, folder: str | Path, config: Config, images: ImageReader):
        self.path = Path(path)
        self.config = config
        self.images = images
        self._template = ChatTemplate(folder, config)
        starts, lines = [], []
        try:
            with open(self.path, "rb") as file:
                start = 0
                for line, text in enumerate(file, start=1):
                    if text.strip():
                        starts.append(start)
                        lines.append(line)
                    start += len(text)
        except OSError as error:
            self._fail(None, f"the data file cannot be read: {error.strerror}", error)
        if not starts:
            self._fail(None, "the data is empty: found no rows, expected one JSON object a line")
        self._starts = np.array(starts, dtype=np.int64)
        self._lines = np.array(lines, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, index: int) -> str:
        """File and line of a row, for messages."""
        return f"{self.path}:{self._lines[index]}"

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

    def _parse(self, index: int, line: int) -> dict[str, Any]:
        """The row's JSON object, with known keys only."""
        with open(self.path, "rb") as file:
            file.seek(int(self._starts[index]))
            text = file.readline()
        try:
            row = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            self._fail(line, f"not UTF-8: {error.reason} at byte {error.start}", error)
        except (ValueError, RecursionError) as error:
            self._fail(line, f"broken JSON: {error}", error)
        if not isinstance(row, dict):
            self._fail(line, f"found {_kind(row)}, expected a JSON object")
        for keys in (CHAT_KEYS, TOKEN_KEYS):
            if set(row) <= set(keys) and set(row) >= set(keys) - {"images"}:
                return row
        self._fail(
            line,
            f"found keys {list(row)}, expected {list(CHAT_KEYS)} or {list(TOKEN_KEYS)} "
            "(images may be left out)",
        )

    def _image_paths(self, row: dict[str, Any], line: int) -> tuple[Path, ...]:
        """The row's image files, relative to the data file."""
        names = row.get("images", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self._fail(line, f"images: found {_kind(names)}, expected a list of paths")
        return tuple(self.path.parent / name for name in names)

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
        return Sample(np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64), grids)

    def _fail(self, line: int | None, reason: str, cause: Exception | None = None) -> NoReturn:
        raise RowError(self.path, line, reason) from cause


def _integer_fault(values: Any) -> str | None:
    """Why something is no list of token ids or labels, or None."""
    if not isinstance(values, list):
        return f"found {_kind(values)}, expected a list of integers"
    odd: Sequence[Any] = [v for v in values if type(v) is not int or not -(2**63) <= v < 2**63]
    return f"found {json.dumps(odd[0])}, expected integers" if odd else None


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")
