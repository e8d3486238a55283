"""The call whose annotations are being checked: the one place that knows jaxtyping's insides.

jaxtyping keeps, for each call, the sizes that names are bound to and the call's arguments, in
``jaxtyping._storage``, and the function in a local of the frame that checks it. It has no public
way to read them, so this module uses the private ones, inside functions: nothing here runs unless
annotations are checked. What looks for the call must not be a checked call itself where the hook
covers this package too: hence ``no_type_check``.
"""

import inspect
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import cast, no_type_check


@dataclass(frozen=True)
class CallScope:
    """What is known of the call being checked.

    Attributes:
      sizes: size of each dim name bound so far; what is put here is bound.
      arguments: the arguments by parameter name.
    """

    sizes: MutableMapping[str, int]
    arguments: Mapping[str, object]

    def argument(self, value: object) -> str | None:
        """The parameter that a value was passed for; None if it is no argument itself."""
        return next((name for name, given in self.arguments.items() if given is value), None)

    @property
    def bound(self) -> dict[str, int]:
        """The sizes as messages show them: without jaxtyping's own entries."""
        return {name: size for name, size in self.sizes.items() if not name.startswith("~~")}

    def describe(self, value: object) -> str:
        """The value in a message: ``'x' of module.function``, ``the result of ...`` and so on."""
        argument = self.argument(value)
        frame = inspect.currentframe()
        while frame is not None:
            held = frame.f_locals
            checked = held.get("fn") if frame.f_code.co_name == "wrapped_fn_impl" else None
            if checked is not None and checked.__module__ != __name__:
                of = f"of {checked.__module__}.{checked.__qualname__}"
                if held.get("out") is value:
                    return f"the result {of}"
                return f"'{argument}' {of}" if argument else f"a value in the call {of}"
            frame = frame.f_back
        return "the value"


@no_type_check
def call_scope() -> CallScope:
    """The call being checked; outside of any, an empty scope that nobody else sees."""
    from jaxtyping._storage import get_shape_memo

    sizes, _, _, arguments = cast(
        "tuple[dict[str, int], object, object, dict[str, object]]", get_shape_memo()
    )
    return CallScope(sizes, arguments)
