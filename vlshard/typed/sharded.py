"""``Sharded[Tensor, "float32 b s@cp h d"]``: a layout as an annotation.

To a static type checker it is ``Annotated``, to a runtime one a class: beartype asks it by
``isinstance`` under jaxtyping's import hook (``jaxtyping.install_import_hook``, or pytest's
``--jaxtyping-packages``). Where nobody asks, it costs nothing.

Names bind as jaxtyping's do, one size in a call, together with those of ``Float[Tensor, "b s"]``.
The size is the *global* one: where ``use_mesh`` says on which mesh, a split dim has as many rows
as the layout gives this rank. Without a mesh one process holds everything, and splits say nothing.

A spec of a single name needs a blank, as jaxtyping's do: ``Sharded[Tensor, " m"]``.
"""

from functools import cache
from typing import TYPE_CHECKING, cast, no_type_check

import torch
from torch import Tensor

from vlshard.language import Span, spec_within
from vlshard.typed.call_scope import call_scope
from vlshard.typed.checks import Declared, holds, message

__all__ = ["DTYPES", "Sharded"]

EXACT = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in cast("dict[str, object]", vars(torch)).values()
    if isinstance(dtype, torch.dtype)
}
PLAIN_INTEGERS = {
    name: dtype for name, dtype in EXACT.items() if name.lstrip("u").rstrip("0123456789") == "int"
}
# The words that an annotation may start with: torch's dtypes by name, and jaxtyping's families.
DTYPES = {
    **{name: frozenset([dtype]) for name, dtype in EXACT.items()},
    "float": frozenset(dtype for dtype in EXACT.values() if dtype.is_floating_point),
    "complex": frozenset(dtype for dtype in EXACT.values() if dtype.is_complex),
    "int": frozenset(dtype for dtype in PLAIN_INTEGERS.values() if dtype.is_signed),
    "uint": frozenset(dtype for dtype in PLAIN_INTEGERS.values() if not dtype.is_signed),
}


class ShardedMeta(type):
    """Checks tensors where a runtime type checker asks."""

    tensor: type[Tensor]
    declared: Declared

    @no_type_check
    def __instancecheck__(cls, instance: object) -> bool:
        """Whether it is a tensor as declared; if so, its sizes are bound in the call."""
        return isinstance(instance, cls.tensor) and holds(cls.declared, instance, call_scope())

    @no_type_check
    def __instancecheck_str__(cls, instance: object) -> str:
        """Why it is not, for beartype's message."""
        if not isinstance(instance, cls.tensor):
            return f"is a {type(instance).__qualname__}, not a {cls.tensor.__qualname__}"
        scope = call_scope()
        return message(cls.declared, instance, scope, scope.describe(instance))


def read(text: str) -> Declared:
    """Read an annotation: a dtype word, if there is one, and a spec.

    Raises: SpecError if what is behind the dtype is no spec.
    """
    word = (text.split() or [""])[0]
    if word not in DTYPES:
        return Declared(spec_within(text, text), frozenset(), Span(0, 0))
    start = text.index(word)
    span = Span(start, start + len(word))
    return Declared(spec_within(" " * span.stop + text[span.stop :], text), DTYPES[word], span)


@cache
def declare(tensor: type[Tensor], text: str) -> ShardedMeta:
    """The class of tensors of a type and layout."""
    name = f"Sharded[{tensor.__qualname__}, {text!r}]"
    return ShardedMeta(
        name, (), {"tensor": tensor, "declared": read(text), "__module__": "vlshard"}
    )


if TYPE_CHECKING:
    from typing import Annotated as Sharded
else:

    class Sharded:
        """``Sharded[Tensor, "float32 b s@cp h d"]``: a tensor type, and its dtype and layout."""

        def __class_getitem__(cls, item: object) -> ShardedMeta:
            """The class to annotate with.

            Args:
              item: a tensor type, and a spec behind an optional dtype word (``DTYPES``).
            Returns: a class whose instances are the tensors that fit, for ``isinstance``.
            Raises: SpecError if the text is no spec; TypeError if something else is given.
            """
            match item:
                case (type() as tensor, str() as text) if issubclass(tensor, Tensor):
                    return declare(tensor, text)
                case _:
                    raise TypeError("write Sharded[Tensor, 'b s@cp m']: a tensor type and a spec")
