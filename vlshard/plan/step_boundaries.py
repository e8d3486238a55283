"""What a core calls under a plan: the boundaries of one micro-batch."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vlshard.attention import Heads, Schedule
from vlshard.comm import (
    Hosts,
    Mesh,
    Pending,
    RowMove,
    Visits,
    all_reduce,
    send_ahead,
    untraced,
)
from vlshard.language import IntArray
from vlshard.plan.doors import Door
from vlshard.plan.header import Share
from vlshard.plan.lookup import Lookup, merge_parts
from vlshard.plan.model_config import VOCABULARY
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
        vocabulary: Lookup | None = None,
        *,
        shared_vocabulary: bool = False,
        hosts: Mapping[str, Hosts] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.share = share
        self._schedules = schedules
        self._merged = merged
        self._doors = dict(doors or {})
        self._vocabulary = vocabulary
        self._untold = shared_vocabulary and vocabulary is None
        self._hosts = hosts or {}
        self._mesh = mesh

    @property
    def targets(self) -> IntArray | None:
        """Ids that the labelled rows predict that enter a vocabulary which ranks share, or None."""
        return None if self._vocabulary is None else self._vocabulary.targets

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
        indices += self._vocabulary.indices if self._vocabulary else []
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
        door = self._door(inside)
        return x if door is None else door.enter(x)

    @untraced
    def leave(self, inside: str, x: Tensor) -> Tensor:
        """This rank's tokens, what ranks computed in parts summed; see ``Boundaries.leave``."""
        door = self._door(inside)
        return x if door is None else door.leave(x)

    def _door(self, inside: str) -> Door | Regathered | Lookup | None:
        """The way into an inside that a split cuts, and out of it."""
        return self._lookup if inside == VOCABULARY else self._doors.get(inside)

    @property
    def _lookup(self) -> Lookup | None:
        """The vocabulary, if ranks share it.

        Raises: ValueError if nobody was told what this rank's tokens ask for.
        """
        if self._untold:
            fix = "fix: step(header, vocab=bound.exchange(token_ids(inputs.text)))"
            raise ValueError(f"ranks share {VOCABULARY}, and the step was told no ids; {fix}")
        return self._vocabulary

    @untraced
    def fetch(
        self,
        inside: str,
        table: Float[Tensor, "part m"],
        ids: Int[Tensor, "b s"],
        padding_id: int | None = None,
    ) -> Float[Tensor, "b s m"]:
        """Rows of a table, one for each token; see ``Boundaries.fetch``."""
        if (lookup := self._lookup) is None:
            return F.embedding(ids, table, padding_idx=padding_id)
        return lookup.fetch(table, ids, padding_id)

    def columns(self, inside: str, ids: Int[Tensor, " z"]) -> Int[Tensor, " z"]:
        """Where ids are in this rank's part of the vocabulary; see ``Boundaries.columns``."""
        lookup = self._lookup
        return ids if lookup is None else lookup.columns(ids)

    @untraced
    def merge(self, inside: str, parts: Float[Tensor, "z 3"]) -> Float[Tensor, "z 2"]:
        """What a softmax needs of rows over all columns; see ``Boundaries.merge``."""
        lookup = self._lookup
        return merge_parts(parts[None]) if lookup is None else lookup.merge(parts)

    @untraced
    def argmax(self, inside: str, logits: Float[Tensor, "z part"]) -> Int[Tensor, " z"]:
        """Ids of the largest logits; see ``Boundaries.argmax``."""
        lookup = self._lookup
        return logits.argmax(-1) if lookup is None else lookup.argmax(logits)

    @untraced
    def visits(self, inside: str, experts: Tensor, rows: Tensor, num_rows: int) -> Visits:
        """Where tokens go to their experts; see ``Boundaries.visits``."""
        hosts = self._hosts.get(inside)
        plan = Visits.here if hosts is None else hosts.visits
        return plan(experts, rows, num_rows)

    @untraced
    def dispatch(self, visits: Visits, x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens at their experts; see ``Boundaries.dispatch``."""
        return visits.dispatch(x, shares)

    @untraced
    def combine(self, visits: Visits, y: Tensor) -> Tensor:
        """What experts gave, at home; see ``Boundaries.combine``."""
        return visits.combine(y)

    @untraced
    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks; see ``Boundaries.total``."""
        if self._mesh is None or self._mesh.size == 1:
            return x
        return all_reduce(x, self._mesh.group([*self._mesh.parts]))


def flat_rows(x: Float[Tensor, "... h d"]) -> Float[Tensor, "n h d"]:
    """Rows of a batch one after another."""
    return x.flatten(0, -3)


def as_batch(x: Float[Tensor, "n h d"], rows: int) -> Float[Tensor, "b s h d"]:
    """Positions as rows of a batch again, in one where rows have not equally many."""
    batch = rows if rows and len(x) % rows == 0 else 1
    return x.reshape(batch, len(x) // batch, *x.shape[1:])
