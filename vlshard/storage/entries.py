"""How the tensors of a checkpoint are cut into entries: by the model alone, whatever a plan does.

A file keeps one rectangle of an entry, so entries are small enough and cut so that a rank stores
one rectangle of each: one entry has rows of one factor of a fused dim (of q, of k, of v) only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

from vlshard.storage.norm import local_part
from vlshard.storage.parts import Block, Parts
from vlshard.storage.rectangles import stored_rectangles

PIECE_BYTES = 1 << 26
WIDTH = 4  # bytes of an element, whatever the dtype: names do not depend on it


class WrittenOut(NamedTuple):
    """A dim that is several factors one after another, such as ``(3 h d)``.

    Attributes:
      dim: which one.
      factors: how many.
    """

    dim: int
    factors: int


class Key(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
      name: of the parameter.
      kind: what of it: empty for its values, else a suffix such as ``.exp_avg``.
    """

    name: str
    kind: str = ""

    def entry(self, number: int) -> str:
        """Name of one of its entries."""
        return f"{self.name}/{number}{self.kind}"

    @classmethod
    def of(cls, entry: str) -> "Key":
        """The tensor that an entry is of."""
        name, _, rest = entry.rpartition("/")
        number, dot, kind = rest.partition(".")
        return cls(name, dot + kind) if name and number.isdigit() else cls(entry)


Tensors = Mapping[Key, Tensor]
FusedDims = Mapping[str, WrittenOut]


@dataclass(frozen=True)
class Held:
    """What this rank stores of an entry, one rectangle.

    Attributes:
      offsets: where it begins in the entry.
      whole: shape of the entry.
      values: a view of the local tensor.
    """

    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    values: Tensor


def entry_blocks(shape: tuple[int, ...], fused: WrittenOut | None = None) -> list[Block]:
    """The entries of a tensor, as blocks of it, by number: factor by factor, rows by rows.

    Args:
      shape: of the whole tensor.
      fused: its dim that is written out, if it has one.
    """
    if not shape:
        return [()]
    dim, count = fused or WrittenOut(0, 1)
    rows = shape[0] // count if dim == 0 else shape[0]
    step = max(1, PIECE_BYTES // max(WIDTH * prod(shape[1:]), 1))
    blocks: list[Block] = []
    for factor in range(count):
        part = slice(factor * (shape[dim] // count), (factor + 1) * (shape[dim] // count))
        lead = part.start if dim == 0 else 0
        for start in range(0, rows, step):
            block = [slice(0, size) for size in shape]
            block[dim] = part
            block[0] = slice(lead + start, lead + min(start + step, rows))
            blocks.append(tuple(block))
    return blocks


def held_entries(
    tensors: Tensors, parts: Parts, fused: FusedDims, *, copies: bool = False
) -> dict[str, list[Held]]:
    """What this rank stores of each entry.

    Args:
      tensors: plain tensors or DTensors: wholes, or the parts that this rank computes with.
      parts: the parameters that are cut for compute.
      fused: the parameters with a dim that is written out.
      copies: whether to copy values to the host, so that they stay as they are now.
    Returns: by name of the entry; an entry of which this rank stores nothing is not there.
    """
    found: dict[str, list[Held]] = {}
    for key, tensor in tensors.items():
        local = local_part(tensor).detach()
        local = local.to("cpu", copy=True) if copies else local
        shape = parts.whole_shape(key.name, tuple(tensor.shape))
        blocks = entry_blocks(shape, fused.get(key.name))
        for here, there in stored_rectangles(key.name, tensor, parts):
            for number, block in enumerate(blocks):
                common = tuple(map(_overlap, there, block))
                if all(at.start < at.stop for at in common):
                    offsets = tuple(c.start - b.start for c, b in zip(common, block, strict=True))
                    inner = tuple(map(_inside, here, there, common))
                    whole = tuple(at.stop - at.start for at in block)
                    held = Held(offsets, whole, local[inner])
                    found.setdefault(key.entry(number), []).append(held)
    return found


def whole_entries(
    tensors: Tensors, parts: Parts, fused: FusedDims
) -> Iterator[tuple[Key, str, tuple[int, ...]]]:
    """All entries of tensors, whoever stores them: tensor, name and shape of each."""
    for key, tensor in tensors.items():
        shape = parts.whole_shape(key.name, tuple(tensor.shape))
        for number, block in enumerate(entry_blocks(shape, fused.get(key.name))):
            yield key, key.entry(number), tuple(at.stop - at.start for at in block)


def _overlap(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _inside(here: slice, there: slice, common: slice) -> slice:
    """Where a part of a rectangle lies in the local tensor."""
    shift = here.start - there.start
    return slice(common.start + shift, common.stop + shift)
