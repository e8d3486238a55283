"""What a core calls under a plan: the boundaries of one micro-batch."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from vlshard.attention import Heads, Schedule
from vlshard.comm import Pending, RowMove, send_ahead, untraced
from vlshard.plan.doors import Door
from vlshard.plan.header import Share
from vlshard.plan.regather import Regathered


class StepBoundaries:
    """The boundaries of one micro-batch under a plan.

    Attributes:
      share: what this rank holds.
    """

    def __init__(
        self,
        share: Share,
        schedules: Mapping[str, Schedule],
        merged: RowMove,
        doors: Mapping[str, Door | Regathered] | None = None,
    ) -> None:
        self.share = share
        self._schedules = schedules
        self._merged = merged
        self._doors = doors or {}

    def send_ahead(self, device: torch.device, dtype: torch.dtype) -> None:
        """Send what tensors of this micro-batch will be indexed by to a device, in one copy.

        Args:
          device: where the ranks compute; nothing is sent to the CPU.
          dtype: of activations.
        """
        if device.type == "cpu":
            return
        schedules, doors = self._schedules.values(), self._doors.values()
        indices = [i for one in schedules for i in one.indices(device.type, dtype)]
        indices += [i for door in doors for way in door.ways for i in way.indices]
        send_ahead([*self._merged.indices, *indices], device)

    @untraced
    def start(self, name: str, x: Tensor) -> Pending:
        """Send a tensor over the named boundary; see ``Boundaries.start``.

        Merged rows fly, and are waited for where they are placed, if vision's mode overlaps.
        """
        site, _, role = name.partition(".")
        schedule = self._schedules[site]
        if role != "merged":
            self._check_heads(name, x.shape[-2], schedule.heads)
        move = self._merged if role == "merged" else schedule.q if role == "q" else schedule.kv
        rows = x if role == "merged" else flat_rows(x)
        pending = move.start(rows) if schedule.overlap else Pending.here(move(rows))
        return pending.then(lambda y: as_batch(y, x.shape[0])) if x.ndim == 4 else pending

    def _check_heads(self, name: str, found: int, heads: Heads | None) -> None:
        """This rank computes the heads that the plan's splits leave it.

        Raises: ValueError: a model whose parameters are not cut computes all heads on every rank,
          which would be summed.
        """
        wanted = None if heads is None else heads.q if name.endswith(".q") else heads.kv
        if wanted not in (None, found):
            fix = "fix: give shard_model, and what fills the weights, parts=bound.parts"
            raise ValueError(f"{name} has {found} heads, the plan leaves a rank {wanted}; {fix}")

    @untraced
    def attend(self, site: str, q: Pending, k: Pending, v: Pending) -> Tensor:
        """Attention inside segments; see ``Boundaries.attend``."""
        key, value, query = flat_rows(k.wait()), flat_rows(v.wait()), flat_rows(q.wait())
        return self._schedules[site].attend(query, key, value)

    @untraced
    def enter(self, inside: str, x: Tensor) -> Tensor:
        """Tokens to compute an inside on; see ``Boundaries.enter``."""
        door = self._doors.get(inside)
        return x if door is None else door.enter(x)

    @untraced
    def leave(self, inside: str, x: Tensor) -> Tensor:
        """This rank's tokens, what ranks computed in parts summed; see ``Boundaries.leave``."""
        door = self._doors.get(inside)
        return x if door is None else door.leave(x)


def flat_rows(x: Float[Tensor, "... h d"]) -> Float[Tensor, "n h d"]:
    """Rows of a batch one after another."""
    return x.flatten(0, -3)


def as_batch(x: Float[Tensor, "n h d"], rows: int) -> Float[Tensor, "b s h d"]:
    """Positions as rows of a batch again, in one where rows have not equally many."""
    batch = rows if rows and len(x) % rows == 0 else 1
    return x.reshape(batch, len(x) // batch, *x.shape[1:])
