"""The cut vocabulary of one micro-batch: rows of its tables, labelled rows, and merged results."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from vlshard.comm import Index, RowMove, all_reduce, gather_blocks, refuse_second_derivative
from vlshard.language import IntArray


@dataclass(frozen=True, eq=False)
class Lookup:
    """What this rank does for a micro-batch; see the methods of ``Boundaries``.

    Attributes:
      needed: ids of the rows that its tokens need, increasing.
      places: of each token, which of these rows it needs; one more than there are where it needs
        none.
      rows: brings these rows here.
      labelled: brings labelled rows to all that share the vocabulary.
      targets: ids that all these predict, in the order in which they come.
      part: the first id of this rank's part of the vocabulary, and the first behind it.
      group: the ranks that share the vocabulary.
    """

    needed: IntArray
    places: IntArray
    rows: RowMove
    labelled: RowMove
    targets: IntArray
    part: tuple[int, int]
    group: ProcessGroup | None
    copies: dict[torch.device, Tensor] = field(
        default_factory=dict[torch.device, Tensor], repr=False
    )

    def fetch(
        self, table: Float[Tensor, "part m"], ids: Int[Tensor, "*b"], padding_id: int | None
    ) -> Float[Tensor, "*b m"]:
        """Rows of the tokens: each row comes once, and its gradients go home as one.

        Raises: ValueError if these are not the tokens that were told of.
        """
        if ids.numel() != self.places.size:
            raise ValueError(f"{ids.numel()} tokens, {self.places.size} were told of: other inputs")
        rows = F.pad(self.rows(table), (0, 0, 0, 1))  # the last one is for tokens that need none
        places = self._places.on(table.device).view(ids.shape)
        return F.embedding(places, rows, padding_idx=self._place(padding_id))

    def enter(self, x: Float[Tensor, "y m"]) -> Float[Tensor, "z m"]:
        """The labelled rows of all ranks that share the vocabulary."""
        return self.labelled(x)

    def leave(self, x: Tensor) -> Tensor:
        """What all of them have alike: its gradients are summed."""
        return x if self.group is None else _apply_alike(x, self.group)

    def columns(self, ids: Int[Tensor, " z"]) -> Int[Tensor, " z"]:
        """Where ids are in this rank's part; negative where they are not."""
        begin, end = self.part
        return (ids - begin).where((ids >= begin) & (ids < end), -1)

    def merge(self, parts: Float[Tensor, "z 3"]) -> Float[Tensor, "z 2"]:
        """Log-sum-exps and target logits from the parts of all ranks, in one order on all."""
        return merge_parts(gather_blocks(parts, self.group))

    def argmax(self, logits: Float[Tensor, "z part"]) -> Int[Tensor, " z"]:
        """Ids of the largest logits; of equal ones the smallest."""
        found = logits.new_full(logits.shape[:1], -torch.inf)
        places = torch.zeros_like(found, dtype=torch.int64)
        if logits.shape[1]:
            found, places = logits.max(-1)
        values, ids = (gather_blocks(x, self.group) for x in (found, places + self.part[0]))
        return ids.gather(0, values.argmax(0)[None])[0]

    @property
    def indices(self) -> list[Index]:
        """What tensors are indexed by, forward and backward."""
        return [self._places, *self.rows.indices, *self.labelled.indices]

    @property
    def _places(self) -> Index:
        return Index(self.places, self.copies)

    def _place(self, row: int | None) -> int | None:
        """Where the row of an id is among those that come; None if it is not."""
        if row is None:
            return None
        at = int(np.searchsorted(self.needed, row))
        return at if at < self.needed.size and self.needed[at] == row else None


def merge_parts(parts: Float[Tensor, "ranks z 3"]) -> Float[Tensor, "z 2"]:
    """Log-sum-exp and target logit of rows of which each rank has some columns.

    Args:
      parts: of each rank, the largest logit of a row, the sum of what all are over that, as powers
        of e, and the logit of its target; -inf, 0 and 0 where it has no column, 0 where it has not
        the target.
    """
    largest, sums, targets = parts.unbind(-1)
    most = largest.amax(0)
    total = ((largest - most).exp() * sums).sum(0)
    return torch.stack([most + total.log(), targets.sum(0)], -1)


class _Alike(torch.autograd.Function):
    """What all ranks of a group hold alike, so that each one's gradient is a term of the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a merged loss")
        return all_reduce(grad_outputs[0], ctx.group), None


def _apply_alike(x: Tensor, group: ProcessGroup) -> Tensor:
    """``_Alike.apply`` with its type."""
    function: Any = _Alike
    return function.apply(x, group)
