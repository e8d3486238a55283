"""Checks shapes and types at run time, in the modules that annotate shapes.

The other modules compute on the host with plain types, which the static checker has seen; a check
at run time would make each of their calls take several times as long.

What is checked is what ``jaxtyping.install_import_hook`` checks: every function and dataclass of
such a module, its arguments, then its result, one size a name in a call. It costs less: a check is
made at the first call, a call's arguments are looked at once, and a function that no array goes
in or out of keeps no book of sizes.
"""

import ast
import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, ForwardRef, get_args

from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError, config, jaxtyped

ROOT = Path(__file__).parents[1]
PACKAGES = ("vlshard", "model", "plans")
DECORATOR = "_checked_"
SIZES = jaxtyped("context")  # one size a name, from here to where it is left


def shaped_modules() -> list[str]:
    """Names of the project's modules that annotate tensors with their dims."""
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in files
        if "from jaxtyping import" in path.read_text()
    ]


def install() -> None:
    """Check these modules from now on; none of them may have been imported before."""
    sys.meta_path.insert(0, Finder(shaped_modules()))


def checked(made: Any) -> Any:
    """A function, or a dataclass, that raises where it is called with or gives what it should not.

    Raises: TypeCheckError, or beartype's where no array is meant.
    """
    if not isinstance(made, type):
        return _checked_function(made)
    if dataclasses.is_dataclass(made):
        made.__init__ = _checked_function(made.__init__)
    return made


def _checked_function(function: Callable[..., Any]) -> Callable[..., Any]:
    run: Callable[..., Any] | None = None

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        nonlocal run
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        if run is None:
            run = _with_checks(function)
        return run(*args, **kwargs)

    return wrapper


def _with_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the checks that its annotations need."""
    kinds = [_kind(hint) for hint in function.__annotations__.values()]
    if "computed" in kinds:
        return jaxtyped(typechecker=beartype)(function)
    if "sized" not in kinds:
        return beartype(function)
    typed = beartype(function)

    def sized(*args, **kwargs):
        with SIZES:
            try:
                return typed(*args, **kwargs)
            except BeartypeCallHintViolation as error:
                raise TypeCheckError(str(error)) from error

    return sized


def _kind(hint: Any) -> str:
    """``plain``, ``sized`` where names may have sizes, ``computed`` where those use arguments."""
    if isinstance(hint, str | ForwardRef):
        return "computed"
    if "{" in getattr(hint, "dim_str", ""):
        return "computed"
    parts = (part for part in get_args(hint) for part in (part if type(part) is list else [part]))
    kinds = {_kind(part) for part in parts}
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        kinds.add("plain" if _checks_class_alone(hint) else "sized")
    return next((kind for kind in ("computed", "sized") if kind in kinds), "plain")


def _checks_class_alone(hint: type) -> bool:
    """Whether nothing but a value's class decides."""
    return not hasattr(type(hint), "__instancecheck_str__")


class Finder(MetaPathFinder):
    """Finds the modules of these names as usual, to be loaded with checks."""

    def __init__(self, names: list[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name, path, target=None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self.names else None
        if spec is not None:
            spec.loader = Loader(name, str(spec.origin))
        return spec


class Loader(SourceFileLoader):
    """Decorates each function and class of a module with ``checked``."""

    def path_stats(self, path):
        """None, so that no compiled file is read or written: it would be of other code."""
        raise OSError(path)

    def source_to_code(self, data, path, *, _optimize=-1):
        tree = ast.parse(data, path)
        for node in ast.walk(tree):
            decorator = ast.Name(DECORATOR, ast.Load())
            if isinstance(node, ast.FunctionDef):
                node.decorator_list.append(decorator)  # what decorates it takes it with checks
            elif isinstance(node, ast.ClassDef):
                node.decorator_list.insert(0, decorator)  # when it has become a dataclass
        first = 1 if ast.get_docstring(tree) else 0
        names = [ast.alias(checked.__name__, DECORATOR)]
        tree.body.insert(first, ast.ImportFrom(__name__, names, 0))
        return compile(
            ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize
        )
