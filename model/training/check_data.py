"""Reads every row and image before a run, so that no fault comes up in the middle of it."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from model.data import DATA_ERRORS
from model.training.job import Job
from model.training.report import say, warn
from vlshard.comm import agree

WORKERS = 4
PROGRESS_SECONDS = 5.0
BAD_DATA = 3  # the exit status


def check_data(job: Job) -> int:
    """Read all rows, each on one rank, and list what is wrong with any; a collective.

    Returns: how many rows cannot be used, the same on every rank.
    """
    ranks, me = dist.get_world_size(), dist.get_rank()
    start, found = time.monotonic(), list[tuple[int, str]]()
    mine = range(me, len(job.rows), ranks)
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="check") as pool:
        faults = pool.map(lambda row: row_fault(job, row), mine)
        for row, fault in zip(mine, _told(faults, len(job.rows), ranks), strict=True):
            if fault is not None:
                found.append((row, fault))
    told = sorted((row, text) for other in agree(found, job.patient) for row, text in other)
    if me == 0:
        for _, text in told:
            warn(f"bad row: {text}")
        seconds = time.monotonic() - start
        say(f"checked {len(job.rows):,} rows in {seconds:.1f} s: {len(told)} cannot be used")
    return len(told)


def row_fault(job: Job, row: int) -> str | None:
    """Why a row cannot be trained on, its images decoded, or None."""
    try:
        _, paths = job.rows.row(row)
        job.images.patches_of(paths)
    except DATA_ERRORS as error:
        text = str(error)
        return text if str(job.rows.path) in text else f"{job.rows.where(row)}: {text}"
    return None


def _told(faults: Iterator[str | None], rows: int, ranks: int) -> Iterator[str | None]:
    """The same, with how far it is told on rank 0 now and then."""
    last = time.monotonic()
    for done, fault in enumerate(faults, start=1):
        yield fault
        if dist.get_rank() == 0 and time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            say(f"checked about {min(done * ranks, rows):,} of {rows:,} rows")
