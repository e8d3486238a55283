"""Tensors saved by all ranks and loaded under any other plan: torch.distributed.checkpoint does it.

What a rank stores is told to it as rectangles of entries (`entries`), through planners, its
documented extension. Files are safetensors with what lies where in their headers: nothing is
pickled, and nothing but the files is needed to read them.
"""

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import (
    load,  # pyright: ignore[reportUnknownVariableType]
)
from torch.distributed.checkpoint.state_dict_saver import (
    save,  # pyright: ignore[reportUnknownVariableType]
)

from vlshard.comm import AgreedError, Group, agree, together
from vlshard.language import ShardError, clipped_lines
from vlshard.storage.entries import (
    PIECE_BYTES,
    FusedDims,
    Held,
    Key,
    Tensors,
    entry_blocks,
    held_entries,
    whole_entries,
)
from vlshard.storage.parts import Parts

READ_BYTES = 1 << 22
MOST_OF_A_KIND = 12  # faults of one kind that a message lists
FileFacts = dict[str, Any]  # of one file: its "bytes" and their "checksum"


class SavedError(ShardError):
    """A folder of saved tensors that cannot be written or read, or does not fit."""

    __module__ = "vlshard"


def save_tensors(
    held: Mapping[str, list[Held]], folder: str | PathLike[str], group: Group = None
) -> dict[str, FileFacts]:
    """Write what all ranks store, copies once, into files of at most 64 MiB and a little.

    A collective. A rank needs the size of three files beside what it stores.

    Args:
      held: what this rank stores, of ``held_entries``.
      folder: a new one, that all ranks see.
      group: ranks that take part, on a backend with CPU tensors; None is all of them.
    Returns: size and checksum of every file, by name; the same on every rank.
    Raises: AgreedError on every rank if a rank could not write, or if what is stored leaves an
      element out.
    """
    files = _NotedFiles()
    writer = _Writer(str(folder), save_distributed=True)
    writer.fs = files
    with _told(f"{folder} cannot be written"):
        save({**held}, storage_writer=writer, planner=_SavePlanner(), process_group=group)
    return {name: facts for told in agree(files.written, group) for name, facts in told.items()}


def load_tensors(
    tensors: Tensors,
    folder: str | PathLike[str],
    *,
    parts: Parts,
    fused: FusedDims,
    spare: Collection[Key] = (),
    convert: bool = False,
    group: Group = None,
) -> None:
    """Read into tensors what any plan on any number of ranks has saved.

    A collective; each rank reads what it stores.

    Args:
      tensors: to be filled.
      folder: where they were saved.
      parts: the parameters that are cut for compute.
      fused: the parameters with a dim that is written out.
      spare: tensors that the folder may have beside them.
      convert: whether values may have another dtype there.
      group: ranks that take part, on a backend with CPU tensors; None is all of them.
    Raises: AgreedError on every rank that lists all that is missing, too much, of another shape or
      dtype; nothing is read then.
    """
    reader = _Reader(str(folder))
    with together(SavedError, group=group):
        metadata = reader.read_metadata()
        faults = list(_faults(metadata, tensors, parts, fused, spare, convert))
        if faults:
            raise SavedError(f"{folder} does not fit", notes=faults)
    held = held_entries(tensors, parts, fused)
    with _told(f"{folder} cannot be read"):
        load({**held}, storage_reader=reader, planner=_LoadPlanner(), process_group=group)


def saved_tensors(folder: str | PathLike[str]) -> dict[Key, tuple[torch.dtype, int]]:
    """The tensors of a folder, by its headers: dtype and number of elements of each.

    Raises: SavedError if a file cannot be read.
    """
    found: dict[Key, tuple[torch.dtype, int]] = {}
    for entry, stored in _tensors(_Reader(str(folder)).read_metadata()).items():
        _, count = found.get(Key.of(entry), (None, 0))
        found[Key.of(entry)] = stored.properties.dtype, count + prod(stored.size)
    return found


class SavedFolder:
    """Tensors of a folder, read whole and one at a time by one process."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        """Read the headers of all files.

        Raises: SavedError if one cannot be read.
        """
        self._metadata = _Reader(str(folder)).read_metadata()

    def read(self, key: Key, shape: tuple[int, ...], fused: FusedDims) -> Tensor:
        """One tensor.

        Args:
          key: which.
          shape: of the whole.
          fused: the parameters with a dim that is written out.
        Raises: SavedError if the folder has it not, or not all of it.
        """
        from safetensors import safe_open

        entries = _tensors(self._metadata)
        whole: Tensor | None = None
        for number, block in enumerate(entry_blocks(shape, fused.get(key.name))):
            entry = key.entry(number)
            if entry not in entries:
                raise SavedError(f"missing: {key.name}{key.kind}")
            if whole is None:
                whole = torch.empty(shape, dtype=entries[entry].properties.dtype)
            for chunk in entries[entry].chunks:
                at = self._metadata.storage_data[MetadataIndex(entry, chunk.offsets)]
                opened: Any = safe_open(at.relative_path, framework="pt")
                with opened as file:
                    ends = zip(chunk.offsets, chunk.sizes, strict=True)
                    part = tuple(slice(start, start + size) for start, size in ends)
                    whole[block][part] = file.get_tensor(entry)
        return torch.empty(shape) if whole is None else whole


def file_faults(
    folder: str | PathLike[str], files: Mapping[str, FileFacts], group: Group = None
) -> list[str]:
    """What is wrong with the bytes of a folder's files; a collective.

    Each file is read once, by one rank.

    Args:
      folder: of the files.
      files: sizes and checksums, as ``save_tensors`` gave them.
      group: ranks that take part; None is all of them.
    Returns: a line a fault, the same on every rank.
    """
    ranks = len(agree(None, group)) if group is None else group.size()
    me = 0 if ranks == 1 else torch.distributed.get_rank(group)
    names = sorted(files)
    found = [fault for name in names[me::ranks] for fault in _file_fault(folder, name, files[name])]
    present = {path.name for path in Path(folder).glob("*.safetensors")}
    extra = [f"{name} is there, but was not saved with it" for name in sorted(present - {*names})]
    return [*(fault for told in agree(found, group) for fault in told), *extra]


def _file_fault(folder: str | PathLike[str], name: str, facts: FileFacts) -> Iterator[str]:
    """Compare one file with what was written."""
    found, size = blake2b(digest_size=16), 0
    try:
        with (Path(folder) / name).open("rb") as file:
            while data := file.read(READ_BYTES):
                found.update(data)
                size += len(data)
    except OSError as error:
        yield f"{name} cannot be read: {error.strerror}"
        return
    if size != facts["bytes"]:
        yield f"{name} has {size:,} bytes, {facts['bytes']:,} were written"
    elif found.hexdigest() != facts["checksum"]:
        yield f"{name} has other bytes than were written"


class _Noted:
    """A stream that keeps size and checksum of what is written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._sum, self._size = stream, blake2b(digest_size=16), 0

    def write(self, data: bytes) -> int:
        self._sum.update(data)
        self._size += len(data)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def facts(self) -> FileFacts:
        return {"bytes": self._size, "checksum": self._sum.hexdigest()}


class _NotedFiles(FileSystem):
    """Files of which is known what was written to them."""

    def __init__(self) -> None:
        self.written: dict[str, FileFacts] = {}

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[Any]:
        with super().create_stream(path, mode) as stream:
            noted = _Noted(stream)
            yield noted
        self.written[Path(path).name] = noted.facts


class _Writer(HuggingFaceStorageWriter):
    """Fills each rank's files up to a size: one is held twice while it is written."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            replace(plan, storage_data={**plan.storage_data, "fqn_to_index_mapping": _fill(plan)})
            for plan in super().prepare_global_plan(plans)
        ]


def _fill(plan: SavePlan) -> dict[str, int]:
    """The number of the file, from 1, that each entry of a rank goes into."""
    places: dict[str, int] = {}
    number, room = 1, PIECE_BYTES
    for item in plan.items:
        assert item.tensor_data is not None and item.tensor_data.chunk is not None
        size = prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if size > room and room < PIECE_BYTES:
            number, room = number + 1, PIECE_BYTES
        places[item.index.fqn] = number
        room -= size
    return places


class _SavePlanner(DefaultSavePlanner):
    """Tells what this rank holds, as rectangles of entries."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for entry, rectangles in self._held.items():
            if len(rectangles) > 1:
                raise ValueError(f"{entry}: a rank stores {len(rectangles)} rectangles of it")
            items += [_write_item(entry, rectangle) for rectangle in rectangles]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._held[write_item.index.fqn][0].values

    @property
    def _held(self) -> dict[str, list[Held]]:
        return cast("dict[str, list[Held]]", self.state_dict)


def _write_item(entry: str, held: Held) -> WriteItem:
    properties = TensorProperties(dtype=held.values.dtype)
    data = TensorWriteData(_chunk(held), properties, torch.Size(held.whole))
    index = MetadataIndex(entry, torch.Size(held.offsets))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _chunk(held: Held) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(held.offsets), held.values.shape)


class _Reader(HuggingFaceStorageReader):
    """Reads headers once."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            try:
                self._metadata = super().read_metadata()
            except Exception as error:  # what safetensors raises is no OSError
                raise SavedError(f"{self.path} cannot be read: {error}") from error
        return self._metadata


class _LoadPlanner(DefaultLoadPlanner):
    """Asks for what this rank holds, as rectangles of entries."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self._held, self._stored = cast("dict[str, list[Held]]", state_dict), _tensors(metadata)

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                item
                for entry, held in self._held.items()
                for item in create_read_items_for_chunk_list(
                    entry, self._stored[entry], [_chunk(rectangle) for rectangle in held]
                )
            ]
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.index is not None
        values = self._held[index.fqn][index.index].values
        begins = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return values[tuple(slice(start, start + length) for start, length in begins)]


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata)


def _faults(
    metadata: Metadata,
    tensors: Tensors,
    parts: Parts,
    fused: FusedDims,
    spare: Collection[Key],
    convert: bool,
) -> Iterator[str]:
    """What of a folder does not fit, each tensor named once."""
    stored = _tensors(metadata)
    missing, odd = dict[str, None](), dict[str, None]()
    wanted = set[str]()
    for key, entry, shape in whole_entries(tensors, parts, fused):
        wanted.add(entry)
        name = f"{key.name}{key.kind}"
        if entry not in stored:
            missing[f"missing: {name}"] = None
            continue
        found, dtype = stored[entry], tensors[key].dtype
        if tuple(found.size) != shape:
            odd[f"{name}: part {entry} has shape {list(found.size)}, expected {list(shape)}"] = None
        elif sum(prod(chunk.sizes) for chunk in found.chunks) != prod(shape):
            odd[f"{name}: part {entry} is not whole"] = None
        elif found.properties.dtype != dtype and not convert:
            odd[f"{name} is {found.properties.dtype}, expected {dtype}"] = None
    others = {Key.of(entry) for entry in stored if entry not in wanted} - {*spare}
    extra = [f"unexpected: {key.name}{key.kind}" for key in sorted(others)]
    for kind in (list(missing), extra, list(odd)):
        yield from clipped_lines(kind, MOST_OF_A_KIND)


@contextmanager
def _told(what: str) -> Generator[None]:
    """One line for each thing that went wrong on any rank, which all ranks are told alike."""
    try:
        yield
    except CheckpointException as error:
        texts: dict[str, list[int]] = {}
        for rank, (caught, _) in sorted(error.failures.items()):
            reason = getattr(caught, "strerror", None) or f"{type(caught).__name__}: {caught}"
            texts.setdefault(reason, []).append(rank)
        notes = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items()]
        raise AgreedError(what, notes=notes) from error
