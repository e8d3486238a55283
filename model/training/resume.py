"""Finds the checkpoint that a run goes on from."""

import os
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import torch.distributed as dist

from model.checkpoint import CheckpointError
from model.checkpoint.steps import remove_leftovers, step_folders, tested_run
from model.training.report import say, warn
from model.training.saved_run import SavedRun
from model.training.settings import AUTO, Settings
from vlshard.comm import AgreedError, Group, agree, together


def open_checkpoints(settings: Settings, group: Group) -> SavedRun | None:
    """Look at the folder of checkpoints, and find the one to go on from; a collective.

    Args:
      settings: of the run.
      group: of all ranks, that waits as long as saving may take.
    Returns: the checkpoint, all its files tested; None for a run that starts.
    Raises: AgreedError on every rank if the folder cannot be written, is not seen by all ranks or
      holds a run that does not go on here, or if there is no whole checkpoint where one should be.
    """
    if settings.checkpoint and not settings.dry_run:
        _try_shared(settings.checkpoint, group)
    if settings.resume is None:
        if settings.checkpoint:
            with together(CheckpointError, group=group):
                _refuse_old(settings.checkpoint)
        return None
    auto = str(settings.resume) == AUTO
    place = settings.checkpoint if auto else settings.resume
    assert place is not None
    names = _candidates(place, group)
    if not names and auto:
        tell(f"no checkpoint in {place}: the run starts at step 1")
        return None
    if not names:
        return _tested([place], group)
    return _tested([place / name for name in names], group)


def tell(text: str) -> None:
    """Say something on rank 0."""
    if dist.get_rank() == 0:
        say(text)


def _candidates(place: Path, group: Group) -> list[str]:
    """Names of the checkpoints in a folder, newest first, as rank 0 sees them."""
    names = [path.name for path in step_folders(place).values()]
    return agree(names, group)[0]


def _tested(folders: list[Path], group: Group) -> SavedRun:
    """The first folder whose files are all as they were written."""
    passed: list[str] = []
    for folder in folders:
        start = time.monotonic()
        try:
            run = tested_run(folder, group)
        except AgreedError as error:
            passed.append(str(error))
            continue
        size = sum(file["bytes"] for file in run["files"].values())
        for text in passed:
            if dist.get_rank() == 0:
                warn(f"warning: passed over: {text}")
        cost = f"{size:,} bytes tested in {time.monotonic() - start:.1f} s"
        tell(f"goes on from {folder}, after step {run['step']} ({cost})")
        return SavedRun(folder, run)
    where = folders[0] if len(folders) == 1 else folders[0].parent
    fix = "fix: name another one, or remove what is left of these to start at step 1"
    raise AgreedError(f"no whole checkpoint in {where}", notes=[*passed, fix])


def _try_shared(folder: Path, group: Group) -> None:
    """Write a file on rank 0 that all ranks must see; what killed runs have left goes."""
    name = agree(f".seen-{token_hex(4)}", group)[0]
    writer = dist.get_rank() == 0
    with together(CheckpointError, group=group):
        if writer:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(b"")
            except OSError as error:
                text = f"--checkpoint {folder} cannot be written to: {error.strerror}"
                raise CheckpointError(text) from error
    seen = agree((folder / name).exists(), group)
    with together(CheckpointError, group=group):
        if not all(seen):
            ranks = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
            text = f"--checkpoint {folder}: rank {ranks} does not see what rank 0 writes there"
            raise CheckpointError(f"{text}; checkpoints need a disk that all ranks share")
    if writer:
        with suppress(OSError):
            os.unlink(folder / name)
        if left := remove_leftovers(folder):
            say(f"removed what a killed run has left: {', '.join(left)}")


def _refuse_old(folder: Path) -> None:
    """Refuse to start a run among the checkpoints of another one."""
    old = step_folders(folder)
    if old:
        text = f"--checkpoint {folder} holds checkpoints, up to step {next(iter(old))}"
        raise CheckpointError(f"{text}: add --resume auto to go on, or name another folder")
