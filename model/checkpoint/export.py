"""What an exported Hugging Face folder consists of."""

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoint.folder import RELEASED, check_checkpoint
from model.checkpoint.headers import INDEX, SINGLE, has_weights
from model.config import ARCHITECTURE, Config

SHARD_BYTES = 5_000_000_000
HEADER_BYTES = 128  # of a tensor's entry in a file's header
CONFIG_FILE = "config.json"
COST_FILE = "frame_cost.json"  # what a frame costs, if examples/train.py measured it
RECORD_FILE = "training.json"  # how examples/train.py trained; tells its exports from others
SIDE_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)


@dataclass(frozen=True)
class Piece:
    """One file of an export.

    Attributes:
      file: its name.
      dtypes: of each parameter in it, by name.
      metadata: of its header.
    """

    file: str
    dtypes: dict[str, torch.dtype]
    metadata: dict[str, str]


@dataclass(frozen=True)
class Recipe:
    """What an export consists of.

    Attributes:
      pieces: the weight files.
      swapped: parameters whose last two dims are swapped on disk.
      index: content of the index; None for a single file.
    """

    pieces: tuple[Piece, ...]
    swapped: frozenset[str]
    index: dict[str, Any] | None


def make_recipe(
    tensors: Mapping[str, Tensor],
    config: Config,
    source: Path | None,
    dtype: torch.dtype | None,
    expert_layout: str | None,
    shard_bytes: int,
) -> Recipe:
    """Decide files, dtypes and layouts: the source's if it has weights."""
    if source is None or not has_weights(source):
        dtypes = {name: dtype or tensor.dtype for name, tensor in tensors.items()}
        experts = frozenset(name for name in tensors if ".mlp.experts." in name)
        swapped = experts if expert_layout in (None, RELEASED) else frozenset[str]()
        return _split(tensors, dtypes, swapped, shard_bytes)
    found = check_checkpoint(source, config, expert_layout)
    pieces = tuple(
        Piece(file, {n: dtype or found.entries[n].dtype for n in names}, found.metadata[file])
        for file, names in found.files.items()
    )
    index = copy.deepcopy(found.index)
    metadata = None if index is None else index.get("metadata")
    if isinstance(metadata, dict) and "total_size" in metadata:
        metadata["total_size"] = sum(_size(piece, tensors) for piece in pieces)
    return Recipe(pieces, frozenset(n for n, e in found.entries.items() if e.swapped), index)


def _split(
    tensors: Mapping[str, Tensor],
    dtypes: dict[str, torch.dtype],
    swapped: frozenset[str],
    shard_bytes: int,
) -> Recipe:
    """Fill files in the model's order, each up to a size."""
    groups: list[dict[str, torch.dtype]] = [{}]
    room = shard_bytes
    for name, dtype in dtypes.items():
        size = tensors[name].numel() * dtype.itemsize
        if size > room and groups[-1]:
            groups.append({})
            room = shard_bytes
        groups[-1][name] = dtype
        room -= size
    count = len(groups)
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    files = [SINGLE] if count == 1 else files
    pieces = tuple(Piece(f, g, {"format": "pt"}) for f, g in zip(files, groups, strict=True))
    if count == 1:
        return Recipe(pieces, swapped, None)
    places = {name: piece.file for piece in pieces for name in piece.dtypes}
    total = sum(_size(piece, tensors) for piece in pieces)
    return Recipe(pieces, swapped, {"metadata": {"total_size": total}, "weight_map": places})


def file_sizes(recipe: Recipe, tensors: Mapping[str, Tensor], source: Path | None) -> list[int]:
    """Bytes of each file of an export, nearly: headers are counted by their number of tensors."""
    weights = [_size(piece, tensors) + HEADER_BYTES * len(piece.dtypes) for piece in recipe.pieces]
    sides = [] if source is None else [source / side for side in SIDE_FILES]
    return [*weights, *(side.stat().st_size for side in sides if side.is_file())]


def _size(piece: Piece, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of a file's tensors."""
    return sum(tensors[name].numel() * dtype.itemsize for name, dtype in piece.dtypes.items())


def write_settings(work: Path, config: Config, source: Path | None, recipe: Recipe) -> None:
    """Write config and index, and copy what belongs to the model but is no weight."""
    raw = copy.deepcopy(config.raw)
    raw["architectures"] = [ARCHITECTURE]
    dtypes = {dtype for piece in recipe.pieces for dtype in piece.dtypes.values()}
    if len(dtypes) == 1:
        name = str(dtypes.pop()).removeprefix("torch.")
        sections = [raw.get("text_config") or {}, raw.get("vision_config") or {}]
        for section in [raw, *sections]:
            keys = [key for key in ("dtype", "torch_dtype") if key in section]
            for key in keys or (["dtype"] if section is raw else []):
                section[key] = name
    _write_json(work, CONFIG_FILE, raw, source)
    if recipe.index is not None:
        _write_json(work, INDEX, recipe.index, source)
    for side in SIDE_FILES:
        if source is not None and (source / side).is_file():
            shutil.copyfile(source / side, work / side)


def _write_json(work: Path, name: str, content: Any, source: Path | None) -> None:
    """Write JSON; the source's own file where it says the same."""
    old = None if source is None else source / name
    if old is not None and old.is_file() and json.loads(old.read_text("utf-8")) == content:
        shutil.copyfile(old, work / name)
    else:
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (work / name).write_text(text, encoding="utf-8")
