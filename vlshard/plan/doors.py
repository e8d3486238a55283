"""How tokens go into a split inside of a block and come out of it, in one micro-batch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from vlshard.comm import Lowered, Mesh, lower
from vlshard.language import MeshShape, Packing
from vlshard.programs import Exchange, Program, Slice, ZeroPad


@dataclass(frozen=True, eq=False)
class Door:
    """The way into one inside and out of it.

    Attributes:
      into: brings tokens together that the axes of the split cut.
      out: sums the terms over these axes, each rank keeping its own tokens.
      one_row: tokens are a pack that is the only row of a batch.
    """

    into: Lowered
    out: Lowered
    one_row: bool

    @property
    def ways(self) -> tuple[Lowered, Lowered]:
        """The way in, and the way out."""
        return self.into, self.out

    def enter(self, x: Tensor) -> Tensor:
        """Tokens to compute on."""
        return self._moved(x, self.into)

    def leave(self, x: Tensor) -> Tensor:
        """This rank's tokens, summed."""
        return self._moved(x, self.out)

    def _moved(self, x: Tensor, program: Lowered) -> Tensor:
        return program.run(x[0])[None] if self.one_row else program.run(x)


def make_door(
    programs: tuple[Program, Program],
    mesh: Mesh,
    sizes: Mapping[str, int | Packing],
    *,
    one_row: bool = False,
) -> Door:
    """The way in and out, bound to the sizes of a micro-batch.

    Args:
      programs: into the inside, and out of it.
      mesh: the ranks, whose groups are made.
      sizes: of the tokens' dims, their width included.
      one_row: tokens are a pack that is the only row of a batch.
    """
    into, out = (lower(program, mesh, sizes) for program in programs)
    return Door(into, out, one_row)


def group_axes(programs: Iterable[Program], mesh: MeshShape) -> set[tuple[str, ...]]:
    """Axes of each process group that programs need."""
    return {
        step.axes if isinstance(step, Exchange) else mesh.read(step.axis)
        for program in programs
        for step in program.steps
        if not isinstance(step, Slice | ZeroPad)
    }
