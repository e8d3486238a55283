"""Frozen dataclasses of tensors that torch's tree functions can map over.

The one file that touches ``torch.utils._pytree``.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar, dataclass_transform

import torch.utils._pytree as torch_pytree

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are the children of a torch pytree.

    Instances compare by identity (tensors have no single truth value). Unflattening skips
    ``__init__``, so that a tree of anything (shapes, gradients, None) keeps the class.

    Args:
      cls: a class with annotated fields; static numbers belong in a config, not here.
    Returns: the same class, now a frozen dataclass and a registered pytree node.
    """
    frozen: Any = dataclasses.dataclass(frozen=True, eq=False)(cls)
    names = tuple(field.name for field in dataclasses.fields(frozen))

    def flatten(node: Any) -> tuple[list[Any], None]:
        return [getattr(node, name) for name in names], None

    def unflatten(children: Iterable[Any], _context: None) -> Any:
        node = object.__new__(frozen)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(node, name, child)
        return node

    torch_pytree.register_pytree_node(
        frozen, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )
    return frozen


tree_map = torch_pytree.tree_map
tree_leaves = torch_pytree.tree_leaves
