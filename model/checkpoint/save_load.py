"""Hugging Face folders: loaded into parameters whole or sharded, and written from them."""

import shutil
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from model.checkpoint.export import CONFIG_FILE, SHARD_BYTES, Recipe, make_recipe, write_settings
from model.checkpoint.folder import LAYOUTS, Checkpoint, check_checkpoint, check_parameters
from model.checkpoint.headers import CheckpointError, has_weights
from model.checkpoint.place import check_target, make_sibling, put_in_place
from model.config import Config
from model.modules import Target, named_parameters, write_block
from vlshard.comm import AgreedError, Group, agree, together
from vlshard.storage import Block, Parts

__all__ = [
    "LAYOUTS",
    "Checkpoint",
    "CheckpointError",
    "check_checkpoint",
    "check_target",
    "has_weights",
    "load_checkpoint",
    "save_checkpoint",
]


def load_checkpoint(
    target: Target,
    folder: str | Path,
    config: Config,
    expert_layout: str | None = None,
    parts: Parts | None = None,
    wanted: Collection[str] | None = None,
) -> Checkpoint:
    """Load a Hugging Face folder into parameters.

    Each rank reads only the blocks that it stores. Nothing is sent between ranks.

    Args:
      target: a module whose parameters have Hugging Face names, or (name, tensor) pairs; plain
        tensors or DTensors of any floating dtype and device.
      folder: a Hugging Face folder with safetensors.
      config: of the model.
      expert_layout: layout of experts on disk where shapes cannot tell.
      parts: the parameters of which this rank computes with a part.
      wanted: parameters to load; None is all.
    Returns: where each parameter lies.
    Raises: CheckpointError that lists every fault, before any tensor is read.
    """
    checkpoint = check_checkpoint(folder, config, expert_layout)
    parameters = named_parameters(target)
    check_parameters(parameters, config, parts or Parts())
    for file, names in checkpoint.files.items():
        with safe_open(checkpoint.folder / file, framework="pt") as opened:
            for name in names if wanted is None else [n for n in names if n in wanted]:
                part, swapped = opened.get_slice(name), checkpoint.entries[name].swapped
                read = partial(_read, part, swapped=swapped)
                write_block(name, parameters[name], read, parts)
    return checkpoint


def read_parameter(checkpoint: Checkpoint, name: str) -> Tensor:
    """The whole of a parameter of a folder, in the model's layout."""
    entry = checkpoint.entries[name]
    with safe_open(checkpoint.folder / entry.file, framework="pt") as opened:
        found = opened.get_tensor(name)
    return found.transpose(1, 2) if entry.swapped else found


def save_checkpoint(
    target: Target,
    folder: str | Path,
    config: Config,
    *,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    expert_layout: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    extra: Mapping[str, str] | None = None,
    parts: Parts | None = None,
    read: Callable[[str], Tensor] | None = None,
    group: Group = None,
) -> None:
    """Write a Hugging Face folder that transformers loads.

    A collective: every rank gathers the same tensors in the same order, and rank 0 holds one
    file's tensors at a time and writes. The folder appears under its name when all of it is
    written, or not at all. With a source that has weights, files, names, dtypes and layout of
    experts are the source's; otherwise experts are written as released.

    Args:
      target: a module whose parameters have Hugging Face names, or (name, tensor) pairs; plain
        tensors or DTensors.
      folder: to be written; replaced if it is a checkpoint of this kind, or empty.
      config: of the model; its ``raw`` is written back.
      source: folder that the model came from: its tokenizer, processor, chat template and
        generation settings are copied.
      dtype: of all weights on disk; None keeps the source's, or else that of each tensor.
      expert_layout: ``released`` or ``transposed``; needed where the source's shapes cannot tell.
      shard_bytes: largest size of a file where there is no source to follow.
      extra: text of further files of the folder, by name.
      parts: the parameters of which this rank computes with a part.
      read: gives the whole of a parameter by its name, where the target's have no values.
      group: ranks that take part, on a backend with CPU tensors; None is all of them.
    Raises: CheckpointError on every rank if the target may not be replaced, if the source does not
      fit the config, if a value is not finite in the dtype that it gets, or if writing failed;
      nothing is changed then. ValueError if the parameters are not the config's.
    """
    tensors = named_parameters(target)
    parts = parts or Parts()
    check_parameters(tensors, config, parts)
    final, writer = Path(folder).resolve(), not dist.is_initialized() or dist.get_rank() == 0
    source = None if source is None else Path(source)
    recipe, work = None, None
    try:
        with _agreed(final, group):
            if writer:
                check_target(final)
                wholes = {name: _meta(name, x, parts) for name, x in tensors.items()}
                recipe = make_recipe(wholes, config, source, dtype, expert_layout, shard_bytes)
                work = make_sibling(final)
                write_settings(work, config, source, recipe)
                for name, text in (extra or {}).items():
                    (work / name).write_text(text, encoding="utf-8")
        order = [list(piece.dtypes) for piece in recipe.pieces] if recipe else None
        whole = read or (lambda name: _whole(name, tensors[name], parts))
        failure = _write_pieces(whole, agree(order, group)[0], recipe, work, group)
        with _agreed(final, group):
            if failure is not None:
                raise failure
            if work is not None:
                put_in_place(work, final)
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _agreed(final: Path, group: Group) -> Generator[None]:
    """What fails in the block on one rank fails on all of them with one text."""
    try:
        with together(CheckpointError, group=group):
            try:
                yield
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{final} cannot be written: {error}") from error
    except AgreedError as error:
        raise CheckpointError(str(error)) from error


def _write_pieces(
    whole_of: Callable[[str], Tensor],
    order: list[list[str]],
    recipe: Recipe | None,
    work: Path | None,
    group: Group,
) -> Exception | None:
    """Gather all tensors on all ranks; write them where there is a recipe.

    Ranks that gather do not wait for one that writes; they wait in the group, for longer.

    A failure to write is given back, not raised, so that this rank goes on gathering with the
    others.
    """
    failure: Exception | None = None
    for number, names in enumerate(order):
        written: dict[str, Tensor] = {}
        for name in names:
            whole = whole_of(name)
            if recipe is not None and failure is None:
                dtype = recipe.pieces[number].dtypes[name]
                written[name] = _as_stored(whole, dtype, name in recipe.swapped)
                if not bool(torch.isfinite(written[name]).all()):
                    text = f"{name} has values that are not finite as {_name(dtype)}"
                    failure = CheckpointError(f"{text}: nothing is exported")
        if recipe is not None and work is not None and failure is None:
            piece = recipe.pieces[number]
            try:
                save_file(written, work / piece.file, piece.metadata)
                (work / piece.file).chmod((work / CONFIG_FILE).stat().st_mode & 0o777)
            except (OSError, SafetensorError) as error:
                failure = error
        agree(None, group)
    return failure


def _whole(name: str, tensor: Tensor, parts: Parts) -> Tensor:
    """The whole of a parameter; a collective if it is sharded, or cut for compute."""
    tensor = tensor.detach()
    part = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return parts.gather(name, part)


def _meta(name: str, tensor: Tensor, parts: Parts) -> Tensor:
    """The whole of a parameter, without values."""
    shape = parts.whole_shape(name, tuple(tensor.shape))
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _as_stored(whole: Tensor, dtype: torch.dtype, swapped: bool) -> Tensor:
    """A copy on the CPU, as it is written."""
    whole = whole.transpose(1, 2) if swapped else whole
    return whole.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(part: Any, block: Block, *, swapped: bool) -> Tensor:
    """A block of a tensor on disk, in the model's layout."""
    if any(at.start == at.stop for at in block):
        return torch.zeros([at.stop - at.start for at in block])
    if swapped:
        return part[block[0], block[2], block[1]].transpose(1, 2)
    return part[block]
