"""Counts the bytes of live tensors, and the most there were, while a block of code runs."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vlshard.pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Notes every storage that an operation makes until it is freed.

    Attributes:
      peak: the most bytes that were alive at once, of storages made inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._at_most = 0  # alive, and what was emptied since it was last counted
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def alive(self) -> int:
        """Count the bytes that are alive, of storages made inside; an emptied one has none."""
        for key, (known, _) in self._known.items():
            storage = known()
            self._known[key] = known, 0 if storage is None else storage.nbytes()
        self._at_most = sum(size for _, size in self._known.values())
        return self._at_most

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if is_dense(x)}
        for leaf in tree_leaves(out):
            if is_dense(leaf) and leaf.untyped_storage()._cdata not in given:
                self._note(leaf.untyped_storage())
        if self._at_most > self.peak:
            self.peak = max(self.peak, self.alive())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.ref(storage), storage.nbytes()
            self._at_most += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._at_most -= self._known.pop(key)[1]


def is_dense(x: object) -> bool:
    """Whether it is a tensor with a storage of its own or a shared one."""
    return isinstance(x, Tensor) and x.layout == torch.strided
