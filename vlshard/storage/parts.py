"""Parameters that are cut for compute: which part of each a rank holds, by global index."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, product

from torch import Tensor

from vlshard.comm import Mesh, lower
from vlshard.language import Layout, label
from vlshard.programs import transition

Block = tuple[slice, ...]


@dataclass(frozen=True)
class Parts:
    """The parameters of a model that are cut for compute; all others are whole.

    Attributes:
      layouts: of each such parameter, by name.
      mesh: the ranks; needed where there are any.
    """

    layouts: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    mesh: Mesh | None = None

    def shape(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of what this rank computes with, of a parameter whose whole shape is given."""
        return self.layouts[name].local_shape(self._ranks.here) if name in self.layouts else whole

    def whole_shape(self, name: str, local: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole of a parameter, of which this rank computes with a part."""
        return self.layouts[name].shape if name in self.layouts else local

    def rectangles(self, name: str, block: Block) -> Iterator[tuple[Block, Block]]:
        """Where a block of this rank's part lies in the whole.

        Args:
          name: of a parameter.
          block: slices of the part.
        Returns: rectangles as slices of the block and slices of the whole.
        """
        if name not in self.layouts:
            yield tuple(slice(0, at.stop - at.start) for at in block), block
            return
        pieces = self.layouts[name].pieces(self._ranks.here)
        taken = [held.take(at.start, at.stop) for held, at in zip(pieces, block, strict=True)]
        runs = [list(zip(p.starts.tolist(), p.lengths.tolist(), strict=True)) for p in taken]
        begins = [list(accumulate((n for _, n in dim), initial=0)) for dim in runs]
        for chosen in product(*(range(len(dim)) for dim in runs)):
            places = [(begins[i][k], *runs[i][k]) for i, k in enumerate(chosen)]
            here = tuple(slice(begin, begin + n) for begin, _, n in places)
            yield here, tuple(slice(start, start + n) for _, start, n in places)

    def gather(self, name: str, part: Tensor) -> Tensor:
        """The whole of a parameter, on every rank; a collective where it is cut.

        Args:
          name: of a parameter.
          part: what this rank computes with.
        """
        if name not in self.layouts:
            return part
        cut = self.layouts[name]
        whole = " ".join(map(label, cut.spec.dims))
        program = transition(str(cut.spec), whole, self._ranks, where=None, **cut.sizes)
        return lower(program, self._ranks, cut.sizes).run(part)

    @property
    def _ranks(self) -> Mesh:
        """The ranks, of parameters that are cut."""
        if self.mesh is None:
            raise ValueError("parameters that are cut live on a mesh: Parts(layouts, mesh)")
        return self.mesh
