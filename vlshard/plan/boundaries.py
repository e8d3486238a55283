"""How a pure function meets a plan: it names its boundaries and never asks where tensors live."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from vlshard.attention import Runs, attend_runs
from vlshard.comm import Pending


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
        """Tokens on which this rank computes its part of an inside of a block.

        Args:
          inside: ``vision.attention``, ``vision.mlp``, ``text.attention`` or ``text.mlp``.
          x: this rank's tokens, ``n c`` or ``b s m``.
        Returns: these tokens, and with them those of the ranks that compute the other parts of the
          same inside, where tokens are cut over them.
        """
        ...

    def leave(self, inside: str, x: Tensor) -> Tensor:
        """This rank's tokens, with the parts that ranks have computed of an inside summed.

        What is added once, such as a bias behind the last product, is added to the result.

        Args:
          inside: as for ``enter``.
          x: this rank's part, for the tokens that ``enter`` gave.
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


def local_boundaries(segments: Sequence[int] = ()) -> LocalBoundaries:
    """Boundaries of a process that holds everything.

    Args:
      segments: length of each vision segment (one frame each) [patches].
    """
    return LocalBoundaries(segments)
