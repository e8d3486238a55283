"""The steps that programs are made of: a closed union of frozen dataclasses.

Dims are written as in the spec, without splits: ``s``, ``(img s)``; axes too, joined ones in
brackets: ``cp``, ``cp.0``, ``(dp cp)``. Each step's backward is fixed by its forward: a value
replicated over an axis has a gradient that is partial over it, a partial value a replicated one, a
split value a split one.
"""

from dataclasses import dataclass
from typing import assert_never


@dataclass(frozen=True)
class AllGather:
    """Undo the last split of a dim: every rank of the axis gets the blocks of all."""

    axis: str
    dim: str

    def __str__(self) -> str:
        return f"AllGather {self.dim} over {self.axis}"


@dataclass(frozen=True)
class ReduceScatter:
    """Sum the terms over an axis; each of its ranks keeps its block of a dim."""

    axis: str
    dim: str

    def __str__(self) -> str:
        return f"ReduceScatter {self.dim} over {self.axis}"


@dataclass(frozen=True)
class AllToAll:
    """Move the last split of dim ``src`` to become the last of dim ``dst``."""

    axis: str
    src: str
    dst: str

    def __str__(self) -> str:
        return f"AllToAll {self.src} -> {self.dst} over {self.axis}"


@dataclass(frozen=True)
class Slice:
    """Split a dim that is whole over an axis: each rank keeps its block, nothing is sent."""

    axis: str
    dim: str

    def __str__(self) -> str:
        return f"Slice {self.dim} over {self.axis}"


@dataclass(frozen=True)
class ZeroPad:
    """The backward of a slice: zeros around the block, a term of a sum over the axis."""

    axis: str
    dim: str

    def __str__(self) -> str:
        return f"ZeroPad {self.dim} over {self.axis}"


@dataclass(frozen=True)
class AllReduce:
    """Sum the terms over an axis, on every rank of it."""

    axis: str

    def __str__(self) -> str:
        return f"AllReduce over {self.axis}"


@dataclass(frozen=True)
class Exchange:
    """Send rows of a dim, by index, to the ranks of the axes that want them."""

    axes: tuple[str, ...]
    dim: str

    def __str__(self) -> str:
        return f"Exchange {self.dim} over {' '.join(self.axes)}"


Step = AllGather | ReduceScatter | AllToAll | Slice | ZeroPad | AllReduce | Exchange


def dual(step: Step) -> Step:
    """The step that a step's backward is.

    Args:
      step: a step of a forward program.
    Returns: what happens to the gradient; of an exchange, the same with rows going back (and
      summed where they went to several ranks).
    """
    match step:
        case AllGather(axis, dim):
            return ReduceScatter(axis, dim)
        case ReduceScatter(axis, dim):
            return AllGather(axis, dim)
        case AllToAll(axis, src, dst):
            return AllToAll(axis, src=dst, dst=src)
        case Slice(axis, dim):
            return ZeroPad(axis, dim)
        case ZeroPad(axis, dim):
            return Slice(axis, dim)
        case AllReduce() | Exchange():
            return step
        case _:
            assert_never(step)
