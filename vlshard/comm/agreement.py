"""Ranks tell each other small facts and errors, so that all decide alike; JSON only, no pickle."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from vlshard.language import ShardError

MAX_BYTES = 1 << 26
MAX_ERRORS = 8

Group = dist.ProcessGroup | None


class AgreedError(ShardError):
    """An error that every rank raises with the same text, so that one rank may report it."""

    __module__ = "vlshard"


def agree(payload: Any, group: Group = None) -> list[Any]:
    """Give every rank the payloads of all ranks.

    A collective over CPU tensors where the backend serves them (gloo), else over the device's.
    Without torch.distributed there is one rank, this one.

    Args:
      payload: what JSON can say (None, numbers, strings, lists, dicts with string keys).
      group: the ranks that take part; None is all of them.
    Returns: one payload a rank, in rank order, as JSON reads it back (tuples become lists).
    Raises: AgreedError on every rank if a payload has more than ``MAX_BYTES`` bytes.
    """
    return [json.loads(data) for data in exchange_bytes(json.dumps(payload).encode(), group)]


def exchange_bytes(data: bytes, group: Group = None) -> list[bytes]:
    """Give every rank the bytes of all ranks: one all-gather of sizes, one of content.

    A collective as ``agree`` is one.

    Args:
      data: this rank's.
      group: the ranks that take part; None is all of them.
    Returns: one string of bytes a rank, in rank order.
    Raises: AgreedError on every rank if one has more than ``MAX_BYTES`` bytes.
    """
    if not dist.is_initialized():
        return [data]
    lengths = [int(size) for size in _gather(torch.tensor([len(data)]), group)]
    _check_lengths(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    blobs = _gather(padded, group)
    return [blob[:length].numpy().tobytes() for blob, length in zip(blobs, lengths, strict=True)]


def raise_together(error: str | None, group: Group = None) -> None:
    """Raise on every rank if any rank has an error; equal errors are named once.

    Args:
      error: this rank's error, or None.
      group: the ranks that take part; None is all of them.
    Raises: AgreedError with the same text on every rank.
    """
    raise_any(agree(error, group))


def raise_any(errors: list[str | None]) -> None:
    """Raise one error that names each different one, in the order given, if there are any.

    Args:
      errors: what all ranks know alike, None where nothing is wrong.
    Raises: AgreedError if an entry is not None.
    """
    distinct = list(dict.fromkeys(error for error in errors if error is not None))
    if len(distinct) > MAX_ERRORS:
        distinct[MAX_ERRORS:] = [f"... and {len(distinct) - MAX_ERRORS} more errors"]
    if distinct:
        raise AgreedError("\n".join(distinct))


@contextmanager
def together(*expected: type[Exception], group: Group = None) -> Generator[None]:
    """Run a block that may fail on some ranks only; then no rank goes on alone.

    The block must not communicate, or only in ways that do not outlast a failing rank.

    Args:
      *expected: errors that are told by their text alone. Any other exception is raised as it is
        on the rank that met it, and named with that rank on the others.
      group: the ranks that take part; None is all of them.
    Raises: AgreedError with the same text on every rank for expected errors.
    """
    error, surprise = None, None
    try:
        yield
    except (AgreedError, *expected) as caught:
        error = str(caught)
    except Exception as caught:
        error, surprise = on_rank(caught), caught
    try:
        raise_together(error, group)
    except AgreedError:
        if surprise is not None:
            raise surprise from None
        raise


def on_rank(error: Exception) -> str:
    """An unexpected error in words, with the rank that met it, which is this one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank}: {type(error).__name__}: {error}"


def _gather(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """The tensors of all ranks; all of one shape."""
    x = x.to(_device(group))
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return [part.cpu() for part in parts]


def _device(group: Group) -> torch.device:
    """Where a group can send from: the CPU if it serves that. torch has no public way to ask."""
    served = cast(Any, group or dist.group.WORLD)._device_types
    cpu = torch.device("cpu")
    return cpu if cpu in served else torch.accelerator.current_accelerator() or cpu


def _check_lengths(lengths: list[int]) -> None:
    """Refuse a payload that is too large, on every rank alike."""
    largest = max(lengths)
    if largest > MAX_BYTES:
        rank = lengths.index(largest)
        raise AgreedError(f"rank {rank} has {largest} bytes to tell, more than {MAX_BYTES}")
