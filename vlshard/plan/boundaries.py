"""How a pure function meets a plan: it names its boundaries and never asks where tensors live."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vlshard.attention import Runs, attend_runs
from vlshard.comm import Pending, Visits
from vlshard.plan.lookup import merge_parts


@runtime_checkable
class Boundaries(Protocol):
    """The names at which a plan may change where tensors live."""

    def start(self, name: str, x: Tensor) -> Pending:
        """Send a tensor over the named boundary.

        Args:
          name: ``vision.q``, ``vision.k``, ``vision.v``, ``text.q``, ``text.k``, ``text.v`` (taken
            by ``attend``) or ``vision.merged`` (waited for by the caller: visual tokens in the
            order of this rank's placeholders).
          x: the tensor in the layout that the computation so far has: ``(img s) h d`` for vision,
            ``b s h d`` for text, ``(img s) m`` for merged rows.
        Returns: the tensor in flight; one consumer waits for it.
        """
        ...

    def attend(self, site: str, q: Pending, k: Pending, v: Pending) -> Tensor:
        """Attention inside segments, causal for text.

        Args:
          site: ``vision`` or ``text``.
          q: queries as ``start`` gave them.
          k: keys, with as many or fewer heads (a divisor of the queries').
          v: values, as many heads as keys.
        Returns: one row per query row that this rank brought to ``start``, in its layout.
        """
        ...

    def enter(self, inside: str, x: Tensor) -> Tensor:
        """Tokens on which this rank computes its part of an inside.

        Args:
          inside: ``vision.attention``, ``vision.mlp``, ``text.attention`` or ``text.mlp``; or
            ``text.vocab``, which labelled rows enter.
          x: this rank's tokens, ``n c`` or ``b s m``; of the vocabulary its labelled rows, ``y m``.
        Returns: these tokens, and with them those of the ranks that compute the other parts of the
          same inside, where tokens are cut over them.
        """
        ...

    def leave(self, inside: str, x: Tensor) -> Tensor:
        """This rank's tokens, with the parts that ranks have computed of an inside summed.

        What is added once, such as a bias behind the last product, is added to the result.

        Args:
          inside: as for ``enter``.
          x: this rank's part, for the tokens that ``enter`` gave; of the vocabulary what all ranks
            have alike of merged rows, such as the sum of their losses.
        """
        ...

    def fetch(
        self,
        inside: str,
        table: Float[Tensor, "part m"],
        ids: Int[Tensor, "b s"],
        padding_id: int | None = None,
    ) -> Float[Tensor, "b s m"]:
        """Rows of a table of which each rank may have a part, one for each token.

        Args:
          inside: ``text.vocab``.
          table: this rank's part.
          ids: of this rank's tokens.
          padding_id: id whose row gets no gradient from here, if any.
        Returns: the rows; where ranks have parts, zeros for padding and placeholders, which teach
          no row anything.
        """
        ...

    def columns(self, inside: str, ids: Int[Tensor, " z"]) -> Int[Tensor, " z"]:
        """Where ids are among the columns of this rank's logits.

        Args:
          inside: ``text.vocab``.
          ids: of the vocabulary.
        Returns: one column an id, negative where another rank has it.
        """
        ...

    def merge(self, inside: str, parts: Float[Tensor, "z 3"]) -> Float[Tensor, "z 2"]:
        """What a softmax needs of rows of which each rank may have some columns.

        Not differentiable: who calls it knows the gradient from what it gives. Ranks call it alike
        and get the same bits.

        Args:
          inside: ``text.vocab``.
          parts: of each entered row, over this rank's columns: the largest logit, the sum of the
            powers of e of all less that, and the logit of the target; -inf, 0 and 0 where there is
            no column, 0 where the target is not among them.
        Returns: log-sum-exp and target logit over all columns.
        """
        ...

    def argmax(self, inside: str, logits: Float[Tensor, "z part"]) -> Int[Tensor, " z"]:
        """Ids of the largest logits of rows of which each rank may have some columns.

        Args:
          inside: ``text.vocab``.
          logits: of entered rows, over this rank's columns.
        Returns: one id a row, of equal ones the smallest; the same on all ranks that share them.
        """
        ...

    def visits(self, inside: str, experts: Tensor, rows: Tensor, num_rows: int) -> Visits:
        """Find out which rows this rank computes experts on, and where its own rows go.

        The one place where the host reads from the device. What it gives holds no gradients, so a
        recomputed block keeps it.

        Args:
          inside: ``text.experts``.
          experts: numbers of the experts of each token, ``t k``.
          rows: which rows these tokens are, increasing; the others are padding.
          num_rows: of how many.
        """
        ...

    def dispatch(self, visits: Visits, x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Bring tokens to the ranks that have their experts, each once to a rank.

        Args:
          visits: of these tokens' experts.
          x: this rank's rows, ``n m``.
          shares: of each expert in its token's result, ``t k``, in fp32.
        Returns: the rows on which this rank computes its experts, and the share of each of its
          pairs of a row and an expert, as ``visits`` lists them.
        """
        ...

    def combine(self, visits: Visits, y: Tensor) -> Tensor:
        """Bring home what experts gave, summed.

        Args:
          visits: as for ``dispatch``.
          y: for each row that ``dispatch`` gave, the sum over its experts here, each times its
            share.
        Returns: one row per row of this rank; zeros for padding.
        """
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, the same on each.

        Args:
          x: this rank's term. A loss computed from the sum is the same on every rank: each has to
            add its part of it alone, the loss divided by the number of ranks.
        """
        ...


class LocalBoundaries:
    """No plan: everything is here, nothing moves."""

    def __init__(self, segments: Sequence[int]) -> None:
        self._vision = Runs.segments(segments)

    def start(self, name: str, x: Tensor) -> Pending:
        """The tensor itself."""
        return Pending.here(x)

    def attend(self, site: str, q: Pending, k: Pending, v: Pending) -> Tensor:
        """Attention over the whole segments (vision) or the whole rows, causally (text)."""
        query, key, value = q.wait(), k.wait(), v.wait()
        if site == "vision":
            return attend_runs(query, key, value, self._vision)
        rows, length = query.shape[:2]
        runs = Runs.causal_rows(rows, length)
        flat = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        return attend_runs(*flat, runs).reshape(query.shape)

    def enter(self, inside: str, x: Tensor) -> Tensor:
        """The tokens themselves."""
        return x

    def leave(self, inside: str, x: Tensor) -> Tensor:
        """All of it is here."""
        return x

    def fetch(
        self,
        inside: str,
        table: Float[Tensor, "vocab m"],
        ids: Int[Tensor, "b s"],
        padding_id: int | None = None,
    ) -> Float[Tensor, "b s m"]:
        """One row per token."""
        return F.embedding(ids, table, padding_idx=padding_id)

    def columns(self, inside: str, ids: Int[Tensor, " z"]) -> Int[Tensor, " z"]:
        """Each id is a column."""
        return ids

    def merge(self, inside: str, parts: Float[Tensor, "z 3"]) -> Float[Tensor, "z 2"]:
        """All columns are here."""
        return merge_parts(parts[None])

    def argmax(self, inside: str, logits: Float[Tensor, "z vocab"]) -> Int[Tensor, " z"]:
        """The first of the largest."""
        return logits.argmax(-1)

    def visits(self, inside: str, experts: Tensor, rows: Tensor, num_rows: int) -> Visits:
        """Every expert is here."""
        return Visits.here(experts, rows, num_rows)

    def dispatch(self, visits: Visits, x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens themselves."""
        return visits.dispatch(x, shares)

    def combine(self, visits: Visits, y: Tensor) -> Tensor:
        """All of it is here."""
        return visits.combine(y)

    def total(self, x: Tensor) -> Tensor:
        """This is all."""
        return x


def local_boundaries(segments: Sequence[int] = ()) -> LocalBoundaries:
    """Boundaries of a process that holds everything.

    Args:
      segments: length of each vision segment (one frame each) [patches].
    """
    return LocalBoundaries(segments)
