"""Checkpoints of a run in a folder, one a step: each is whole, or not there under its name.

``step-00000100`` is written as ``step-00000100.part`` and renamed when all ranks have written and
``run.json``, which lists all files with their checksums, is on the disk. An old one is renamed
before it is removed, so a name without ``.part`` never stands for a part, however a run ends.
"""

import json
import os
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch.distributed as dist

from model.checkpoint.headers import CheckpointError
from model.checkpoint.place import put_in_place
from model.config import OddFileError, odd_file, parse_json
from vlshard.comm import Group, agree, together
from vlshard.storage import Held, SavedError, file_faults, save_tensors

RUN_FILE = "run.json"
FORMAT = "vlshard checkpoint 1"
PART = ".part"
NAME = re.compile(r"step-(\d{8,})")
TAIL = re.compile(rb',\n "checksum": "([0-9a-f]{32})"\n}\n')


def step_name(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_folders(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder by step, newest first; whether they are whole is not tested."""
    found = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := NAME.fullmatch(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items(), reverse=True))


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what runs that were killed have left in a folder of checkpoints; names of it."""
    found = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.name.endswith(PART) and NAME.fullmatch(path.name.removesuffix(PART))
    ]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return sorted(path.name for path in found)


def remove_steps(folder: Path, step: int, keep: int, spared: int | None = None) -> None:
    """Remove old checkpoints.

    Args:
      folder: of the checkpoints.
      step: the last one that was written; later ones are not looked at.
      keep: how many stay, this one included.
      spared: a step that stays besides.
    """
    old = [at for at in step_folders(folder) if at <= step][keep:]
    for at in old:
        if at != spared:
            name = step_name(at)
            os.replace(folder / name, folder / f"{name}{PART}")
            shutil.rmtree(folder / f"{name}{PART}", ignore_errors=True)


def write_step(
    folder: Path,
    step: int,
    held: Mapping[str, list[Held]],
    run: Mapping[str, Any],
    group: Group = None,
) -> Path:
    """Write the checkpoint of a step; a collective.

    Args:
      folder: of the checkpoints, seen by all ranks.
      step: that was done.
      held: what this rank stores.
      run: what run.json is to say beside format, step and files; the same on every rank.
      group: ranks that take part, on a backend with CPU tensors; None is all of them.
    Returns: where it is.
    Raises: AgreedError on every rank if it cannot be written; nothing is changed then.
    """
    final, writer = folder / step_name(step), dist.get_rank() == 0
    work = folder / f"{final.name}{PART}"
    try:
        with _agreed(final, group):
            if writer:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
        files = save_tensors(held, work, group)
        with _agreed(final, group):
            if writer:
                write_run(work, {"format": FORMAT, "step": step, **run, "files": files})
                _flush(work)
                put_in_place(work, final)
                _flush(folder)
    finally:
        if writer:
            shutil.rmtree(work, ignore_errors=True)
    return final


def write_run(folder: Path, content: Mapping[str, Any]) -> None:
    """Write run.json; it ends with a checksum of all that stands before."""
    body = json.dumps(content, indent=1, default=str).removesuffix("\n}").encode()
    with (folder / RUN_FILE).open("wb") as file:
        file.write(body + f',\n "checksum": "{_sum(body)}"\n}}\n'.encode())
        file.flush()
        os.fsync(file.fileno())


def read_run(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's run.json.

    Raises: CheckpointError that says what is wrong with it.
    """
    path = folder / RUN_FILE
    try:
        odd = odd_file(path)
        if odd is not None:
            raise OddFileError(odd)
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    at = data.rfind(b',\n "checksum"')
    tail = TAIL.fullmatch(data[at:]) if at >= 0 else None
    if tail is None or tail[1].decode() != _sum(data[:at]):
        raise CheckpointError(f"{path} is not what was written: it ends early, or has other bytes")
    found = parse_json(data.decode())
    if found.get("format") != FORMAT:
        raise CheckpointError(f"{path} is {found.get('format')!r}, expected {FORMAT!r}")
    return found


def tested_run(folder: Path, group: Group = None) -> dict[str, Any]:
    """Test all files of a checkpoint, each read by one rank; a collective.

    Args:
      folder: of the checkpoint, seen by all ranks.
      group: ranks that take part; None is all of them.
    Returns: the content of run.json.
    Raises: AgreedError on every rank that lists what is wrong.
    """
    with together(CheckpointError, group=group):
        run = read_run(folder)
    sums = agree(_sum(json.dumps(run, sort_keys=True).encode()), group)
    with together(CheckpointError, SavedError, group=group):
        if len(set(sums)) > 1:
            raise CheckpointError(f"{folder / RUN_FILE} differs between ranks")
        faults = file_faults(folder, run["files"], group)
        if faults:
            raise SavedError(f"{folder} is not what was written", notes=faults)
    return run


@contextmanager
def _agreed(final: Path, group: Group) -> Generator[None]:
    """What fails on the writing rank fails on all of them with one text."""
    with together(CheckpointError, group=group):
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{final} cannot be written: {error.strerror}") from error


def _flush(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
