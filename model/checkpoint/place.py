"""Where an export goes: what may be replaced, whether there is room, and how it gets its name.

An export is written into a folder beside its target and takes the target's name when it is whole.
A process may be killed at any moment: the target is then the old export or the new one, and what is
left beside it goes when the next export to that place starts.
"""

import ctypes
import os
import resource
import shutil
import socket
import time
from pathlib import Path

import torch

from model.checkpoint.export import (
    CONFIG_FILE,
    COST_FILE,
    RECORD_FILE,
    SHARD_BYTES,
    SIDE_FILES,
    file_sizes,
    make_recipe,
)
from model.checkpoint.headers import INDEX, CheckpointError
from model.config import Config

PART, OLD = "part", "old"
DAY = 86_400
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux


def check_target(folder: str | Path, *, foreign: bool = True) -> None:
    """Refuse to replace what is no checkpoint of this kind.

    Args:
      folder: where an export is to stand.
      foreign: whether it may replace a checkpoint that the training program did not write.
    Raises: CheckpointError that says what stands there.
    """
    folder = Path(folder).resolve()
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: nothing is written over it")
    known = {CONFIG_FILE, COST_FILE, RECORD_FILE, INDEX, *SIDE_FILES}
    names = sorted(path.name for path in folder.iterdir())
    strange = [name for name in names if name not in known and not name.endswith(".safetensors")]
    if strange:
        raise CheckpointError(
            f"{folder} holds {', '.join(strange)}, which no export writes: it is not replaced"
        )
    if names and CONFIG_FILE not in names:
        raise CheckpointError(f"{folder} is not empty and has no {CONFIG_FILE}: it is not replaced")
    if names and not foreign and RECORD_FILE not in names:
        raise CheckpointError(
            f"{folder} holds a checkpoint without {RECORD_FILE}, so no export of training: "
            "name another folder, or add --overwrite to replace it"
        )


def try_target(
    folder: str | Path,
    config: Config,
    source: str | Path | None = None,
    expert_layout: str | None = None,
) -> None:
    """Try whether an export can be written: rights, and room for all of it.

    Args:
      folder: where it is to stand; what a killed export has left there is removed.
      config: of the model.
      source: folder that the model comes from, whose files and dtypes it will have.
      expert_layout: as for ``save_checkpoint``.
    Raises: CheckpointError that says what is in the way.
    """
    final, source = Path(folder).resolve(), None if source is None else Path(source)
    shapes = config.parameter_shapes()
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    recipe = make_recipe(tensors, config, source, None, expert_layout, SHARD_BYTES)
    sizes = file_sizes(recipe, tensors, source)
    work = None
    if final.is_mount():
        raise CheckpointError(
            f"{final} is a mount point, which keeps its name: name a folder in it"
        )
    try:
        work = make_sibling(final)
        (work / CONFIG_FILE).write_bytes(bytes(4096))
        room = shutil.disk_usage(work)
    except OSError as error:
        raise CheckpointError(f"{final} cannot be written: {error}") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    if room.total and sum(sizes) > room.free:
        needs = f"{final}: an export takes {sum(sizes):,} bytes"
        raise CheckpointError(f"{needs} beside what stands there, and {room.free:,} are free")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and max(sizes) > limit:
        needs = f"{final}: an export has a file of {max(sizes):,} bytes"
        raise CheckpointError(f"{needs}, and no file may have more than {limit:,} (ulimit -f)")


def make_sibling(final: Path) -> Path:
    """A new folder beside the target, on the same file system; leftovers of others go."""
    restore(final)
    work = _sibling(final, PART)
    work.mkdir(parents=True)
    return work


def put_in_place(work: Path, final: Path) -> None:
    """Give a complete folder its name; what stood there goes only after that.

    Raises: CheckpointError that says where the whole export is, if it cannot get its name.
    """
    try:
        _put_in_place(work, final)
    except OSError as error:
        kept = final.parent / f"{final.name}.new"
        if kept.exists():
            raise
        os.replace(work, kept)
        text = f"{final} cannot be replaced: {error.strerror}; the export is whole, as {kept}"
        raise CheckpointError(text) from error


def _put_in_place(work: Path, final: Path) -> None:
    if not final.exists():
        os.replace(work, final)
    elif _exchange(work, final):
        shutil.rmtree(work, ignore_errors=True)
    else:
        old = _sibling(final, OLD)
        os.replace(final, old)
        os.replace(work, final)
        shutil.rmtree(old, ignore_errors=True)


def restore(folder: str | Path) -> bool:
    """Remove what killed exports have left beside their target.

    Where folders cannot be exchanged, the target is without a name for a moment. If a process was
    killed in it, the old export gets its name back.

    Args:
      folder: the target.
    Returns: whether the old export had to get its name back.
    """
    final, back = Path(folder).resolve(), False
    for path in sorted(final.parent.iterdir()) if final.parent.is_dir() else ():
        kind = _left(path, final)
        if kind == OLD and not final.exists():
            os.replace(path, final)
            back = True
        elif kind is not None:
            shutil.rmtree(path, ignore_errors=True)
    return back


def _sibling(final: Path, kind: str) -> Path:
    """A name beside the target that says who is at work there."""
    return final.parent / f".{final.name}.{kind}-{os.getpid()}-{socket.gethostname()}"


def _left(path: Path, final: Path) -> str | None:
    """What kind of leftover of the target a path is; None if it is none, or still in use."""
    for kind in (OLD, PART):
        lead = f".{final.name}.{kind}-"
        if path.name.startswith(lead) and path.is_dir():
            number, _, host = path.name.removeprefix(lead).partition("-")
            if not number.isdigit():
                return None
            here = host in ("", socket.gethostname())
            gone = here and (int(number) == os.getpid() or not _runs(int(number)))
            return kind if gone or time.time() - path.stat().st_mtime > DAY else None
    return None


def _runs(process: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; False where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    names = (os.fsencode(one), os.fsencode(other))
    return call(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0
