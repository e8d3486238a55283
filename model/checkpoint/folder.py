"""A Hugging Face folder compared with a config: where each parameter lies, in which layout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoint.headers import CheckpointError, Stored, Weights, read_weights
from model.config import Config, Shape
from vlshard.language import clipped_lines
from vlshard.storage import Parts

RELEASED, TRANSPOSED = "released", "transposed"
MOST_OF_A_KIND = 12  # faults of one kind that a message lists
LAYOUTS = (RELEASED, TRANSPOSED)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class Entry:
    """Where a parameter lies on disk.

    Attributes:
      file: name of its file in the folder.
      dtype: on disk.
      swapped: whether the last two dims are swapped on disk, as released experts are.
    """

    file: str
    dtype: torch.dtype
    swapped: bool


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose tensors are known to be those of a config.

    Attributes:
      folder: where it is.
      entries: by parameter name, in the order of files.
      metadata: of each file.
      index: content of the index; None if there is a single file.
    """

    folder: Path
    entries: dict[str, Entry]
    metadata: dict[str, dict[str, str]]
    index: dict[str, Any] | None

    @property
    def files(self) -> dict[str, list[str]]:
        """Names of parameters by file."""
        files: dict[str, list[str]] = {file: [] for file in self.metadata}
        for name, entry in self.entries.items():
            files[entry.file].append(name)
        return files


def check_checkpoint(
    folder: str | Path, config: Config, expert_layout: str | None = None
) -> Checkpoint:
    """Compare a folder's headers with a config; no tensor is read and nothing is allocated.

    Experts lie on disk as released, ``gate_up_proj [e, m, 2 f]`` and ``down_proj [e, f, m]``, or
    transposed, ``[e, 2 f, m]`` and ``[e, m, f]``. Their shape decides. Where 2 f = m or f = m it
    cannot, and ``expert_layout`` must.

    Args:
      folder: a Hugging Face folder with safetensors.
      config: of the model.
      expert_layout: ``released`` or ``transposed``.
    Returns: where each parameter lies.
    Raises: CheckpointError that lists the faults, some of each kind: files missing or broken,
      tensors missing, unexpected, wrongly shaped, of no floating dtype, or experts of unknown
      layout.
    """
    folder = Path(folder)
    if expert_layout not in (None, *LAYOUTS):
        raise CheckpointError(f"expert layout {expert_layout!r}: expected {' or '.join(LAYOUTS)}")
    weights = read_weights(folder)
    problems = clipped_lines(weights.problems)
    if not weights.tensors and problems:
        raise CheckpointError.listing(folder, problems)
    shapes = config.parameter_shapes()
    problems += clipped_lines(list(_missing(weights, shapes)), MOST_OF_A_KIND)
    problems += clipped_lines(list(_unexpected(weights, shapes)), MOST_OF_A_KIND)
    odd: list[str] = []
    entries: dict[str, Entry] = {}
    for name, stored in weights.tensors.items():
        if name in shapes:
            odd += _shape_faults(name, stored, shapes[name], expert_layout)
            swapped = _swapped(stored.shape, shapes[name], expert_layout)
            entries[name] = Entry(stored.file, DTYPES.get(stored.dtype, torch.float32), swapped)
    problems += clipped_lines(odd, MOST_OF_A_KIND)
    if problems:
        raise CheckpointError.listing(folder, problems)
    return Checkpoint(folder, entries, weights.metadata, weights.index)


def check_parameters(parameters: Mapping[str, Tensor], config: Config, parts: Parts) -> None:
    """Refuse parameters that are not those of the config, or not this rank's parts of them.

    Raises: CheckpointError that lists names and shapes that differ.
    """
    whole = config.parameter_shapes()
    shapes = {name: parts.shape(name, shape) for name, shape in whole.items()}
    missing = [f"the model has no parameter {name}" for name in shapes if name not in parameters]
    others = [f"the model has a parameter {name}" for name in parameters if name not in shapes]
    odd = [
        f"{name} of the model is {list(parameters[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in parameters and tuple(parameters[name].shape) != shape
    ]
    problems = [
        line for kind in (missing, others, odd) for line in clipped_lines(kind, MOST_OF_A_KIND)
    ]
    if problems:
        raise CheckpointError("\n  ".join(["the model is not that of its config", *problems]))


def _missing(weights: Weights, shapes: dict[str, Shape]) -> Iterator[str]:
    """Tensors that are nowhere; those of unreadable files do not count."""
    for name, shape in shapes.items():
        if name not in weights.tensors and name not in weights.unread:
            yield f"missing: {name} {list(shape)}"


def _unexpected(weights: Weights, shapes: dict[str, Shape]) -> Iterator[str]:
    """Tensors that the model does not have."""
    for name, stored in weights.tensors.items():
        if name not in shapes:
            tied = " (the head is tied to the embedding)" if name == "lm_head.weight" else ""
            yield f"unexpected: {name} {list(stored.shape)} in {stored.file}{tied}"


def _shape_faults(name: str, stored: Stored, shape: Shape, layout: str | None) -> Iterator[str]:
    """What is wrong with a tensor whose name is right."""
    if stored.dtype not in DTYPES:
        yield f"{name} has dtype {stored.dtype}, expected one of {', '.join(DTYPES)}"
    other = _other_layout(name, shape)
    if stored.shape not in (shape, other):
        expected = f"{list(shape)}" + (f" or {list(other)}" if other else "")
        yield f"{name} has shape {list(stored.shape)}, expected {expected}"
    elif other == shape and layout is None:
        yield (
            f"{name} has shape {list(stored.shape)} in both layouts of experts: say which one it "
            f"has, {RELEASED} or {TRANSPOSED}"
        )
    elif other and other != shape and layout is not None:
        found = RELEASED if stored.shape == other else TRANSPOSED
        if found != layout:
            yield f"{name} has shape {list(stored.shape)}: that is {found}, not {layout}"


def _other_layout(name: str, shape: Shape) -> Shape | None:
    """Shape of a released expert on disk; None for what is no expert."""
    return (shape[0], shape[2], shape[1]) if ".mlp.experts." in name else None


def _swapped(found: Shape, shape: Shape, layout: str | None) -> bool:
    """Whether the last two dims are swapped on disk, of a tensor without faults."""
    return found != shape or (len(shape) == 3 and shape[1] == shape[2] and layout == RELEASED)
