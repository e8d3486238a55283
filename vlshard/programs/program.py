"""Programs: the steps from one layout to another, what they send, and how they print."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from vlshard.language import Layout, MeshShape, Packing, Spec, layout
from vlshard.programs.information import least_sent
from vlshard.programs.steps import Step, dual
from vlshard.programs.traffic import at_rank, sent


class Traffic(NamedTuple):
    """Bytes that one rank sends to others."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Program:
    """Steps from one layout to another; printable, no tensors.

    Attributes:
      src: layout before.
      dst: layout after.
      mesh: the mesh that both are on.
      steps: what to do, in order; nothing where the layouts are the same.
      between: layouts after each step but the last.
      cost: the fraction of the tensor that it costs: for each step, what the rank sends that sends
        most in it, at sizes that divide; spellings cost nothing. By this programs are chosen, and
        those of different sides compare.
      proven: whether no program of the planner's rules sends less at symbolic sizes.
      spellings: places of steps that write cuts otherwise, joined or apart: exchanges that send
        nothing where sizes divide.
    """

    src: Spec
    dst: Spec
    mesh: MeshShape
    steps: tuple[Step, ...]
    between: tuple[Spec, ...] = ()
    cost: Fraction = Fraction(0)
    proven: bool = False
    spellings: tuple[int, ...] = ()

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """Layouts before the first step, and after each."""
        return (self.src, *self.between, self.dst)

    def layouts(self, mesh: MeshShape, /, **sizes: int | Packing) -> tuple[Layout, ...]:
        """The layouts before the first step, and after each, bound to sizes.

        Args:
          mesh: the mesh of the program, or an equal one.
          sizes: global size or packing of each dim, by name.
        Raises: LayoutError if a size is missing or does not fit.
        """
        return tuple(layout(spec, mesh, where=None, **sizes) for spec in self.specs)

    def bytes_sent(self, /, *, rank: int = 0, itemsize: int = 4, **sizes: int | Packing) -> Traffic:
        """Bytes that a rank sends, exactly.

        Args:
          rank: a global rank of the mesh.
          itemsize: bytes of one element.
          sizes: global size or packing of each dim, by name.
        Returns: bytes forward and backward; an all-reduce of n ranks counts as 2(n-1)/n of the
          tensor, rounded up.
        Raises: LayoutError if a size is missing or does not fit.
        """
        layouts = self.layouts(self.mesh, **sizes)
        found = sent(self.steps, layouts)
        ways = zip(
            *([at_rank(grid, self.mesh, rank) for grid in one] for one in found), strict=True
        )
        return Traffic(*(itemsize * sum(way) for way in ways)) if found else Traffic(0, 0)

    def describe(self, /, *, itemsize: int = 4, **sizes: int | Packing) -> str:
        """The program as a table, with the bytes that each step sends.

        Args:
          itemsize: bytes of one element.
          sizes: global size or packing of each dim, by name.
        Returns: per step the layout that it leads to, its backward, and the bytes of the rank that
          sends most in it, both ways; below them the most that one rank sends in all steps, and
          what the rank that sends most must send forward in any program (``information``).
        Raises: LayoutError if a size is missing or does not fit.
        """
        if not self.steps:
            return str(self)
        found = sent(self.steps, self.layouts(self.mesh, **sizes))
        most = [Traffic(*(itemsize * int(np.max(grid)) for grid in one)) for one in found]
        total = [itemsize * int(np.max(sum(way))) for way in zip(*found, strict=True)]
        rows = [("forward", "layout", "bytes", "backward", "bytes")]
        texts = self._texts
        for step, text, spec, each in zip(self.steps, texts, self.specs[1:], most, strict=True):
            rows.append((text, str(spec), f"{each[0]:,}", str(dual(step)), f"{each[1]:,}"))
        layouts = self.layouts(self.mesh, **sizes)
        least = itemsize * least_sent(layouts[0], layouts[-1])
        sum_up = f"  a rank sends at most {total[0]:,} bytes in all, in backward {total[1]:,}"
        sum_up += f"; no program less than {least:,}"
        return "\n".join([self._head, *_table(rows, "<<><>"), sum_up])

    def __str__(self) -> str:
        if not self.steps:
            return f"{self._head}\n  nothing to do"
        pairs = zip(self.steps, self._texts, strict=True)
        rows = [(text, f"backward {dual(step)}") for step, text in pairs]
        if self.between:
            pairs = zip(rows, self.specs[1:], strict=True)
            rows = [(step, f"-> {spec}", back) for (step, back), spec in pairs]
        return "\n".join([self._head, *_table(rows, "<<<")])

    @property
    def _head(self) -> str:
        """The arrow and the mesh, and whether there may be cheaper programs."""
        doubt = "" if self.proven else "  (the cheapest found, not proven to be)"
        return f"{self.src} -> {self.dst}  on {self.mesh}{doubt}"

    @property
    def _texts(self) -> list[str]:
        """The steps as they print."""
        marks = [" (spelling)" * (i in self.spellings) for i in range(len(self.steps))]
        return [f"{step}{mark}" for step, mark in zip(self.steps, marks, strict=True)]


def _table(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Lines of aligned columns; ``<`` and ``>`` say to which side."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (
            "  " + "  ".join(f"{x:{to}{n}}" for x, to, n in zip(row, sides, widths, strict=False))
        ).rstrip()
        for row in rows
    ]
