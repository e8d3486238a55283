"""A tensor on its way: sent, and waited for once."""

from collections.abc import Callable

from torch import Tensor


class Pending:
    """A tensor on its way to another layout; exactly one consumer waits for it."""

    def __init__(self, arrive: Callable[[], Tensor]) -> None:
        """Take what waits for the tensor and gives it."""
        self._arrive: Callable[[], Tensor] | None = arrive

    @classmethod
    def here(cls, x: Tensor) -> "Pending":
        """A tensor that is there already."""
        return cls(lambda: x)

    def then(self, change: Callable[[Tensor], Tensor]) -> "Pending":
        """The same, changed once it is there; takes the place of this one."""
        return Pending(lambda: change(self.wait()))

    def wait(self) -> Tensor:
        """The tensor in its new layout.

        Raises: RuntimeError if it has been waited for before.
        """
        if self._arrive is None:
            raise RuntimeError(
                "this tensor has been waited for already: a Pending has one consumer; "
                "keep what wait() gave"
            )
        arrive, self._arrive = self._arrive, None
        return arrive()
