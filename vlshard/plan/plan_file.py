"""The file or module of a plan, run; whatever goes wrong in it is one PlanError with its line."""

import importlib.util
import runpy
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlshard.comm import any_world
from vlshard.language import PlanError, ShardError

MOST_RANKS_TRIED = 64


def build_plan(name: str, world: int) -> tuple[object, str]:
    """Call the ``plan(world)`` that a file or a module defines.

    Args:
      name: path of a Python file, or a module.
      world: number of ranks.
    Returns: what it gave, and the file to name in messages.
    Raises: PlanError if there is no such file or module, or if it fails; ShardError that names
      the file's line, if the plan itself is refused.
    """
    with _told(name):
        path = Path(name)
        is_file = name.endswith(".py") or path.exists()
        if is_file and not path.is_file():
            raise PlanError(f"no plan file {name!r}", notes=[_known_plans(path.parent)])
    source = name if is_file else name.replace(".", "/") + ".py"
    with _told(source):
        names = runpy.run_path(name) if is_file else _module(name)
        build = names.get("plan")
        if not callable(build):
            raise PlanError(f"{name} defines no function plan(world)")
        try:
            with any_world():
                return build(world), source
        except ShardError as error:
            ranks = f"{world} rank{'s' if world != 1 else ''}"
            told = f"raised by plan({world}), for a world of {ranks}"
            error.notes = (*error.notes, told, *_fitting_worlds(build))
            raise


def plan_text(name: str) -> str:
    """What stands in the file of a plan that can be built; empty for a module without one.

    Args:
      name: path of a Python file, or a module.
    """
    path = Path(name)
    if not path.is_file():
        found = importlib.util.find_spec(name)
        path = Path((found and found.origin) or "")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _fitting_worlds(build: Callable[[int], object]) -> list[str]:
    """A line that says for how many ranks a plan can be made, if it can for a few."""
    fitting: list[str] = []
    for world in range(1, MOST_RANKS_TRIED + 1):
        try:
            found: Any = build(world)
            if found.mesh.size == world:
                fitting.append(str(world))
        except (Exception, SystemExit):
            continue
    some = ", ".join(fitting[:4]) + (", ..." if len(fitting) > 4 else "")
    return [f"fix: {some} ranks work"] if fitting else []


def _module(name: str) -> Mapping[str, Any]:
    """The names of a module."""
    try:
        return vars(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        known = _known_plans(Path("plans"))
        raise PlanError(f"no plan module {name!r}", notes=[known]) from error


@contextmanager
def _told(source: str) -> Generator[None]:
    """Run code of a plan; what it raises says where, and is a ShardError."""
    try:
        yield
    except ShardError as error:
        error.where = error.where or _line(error, source)
        raise
    except (Exception, SystemExit) as error:
        found = error.msg if isinstance(error, SyntaxError) else error
        headline = f"{source} cannot be used as a plan: {type(error).__name__}: {found}"
        raise PlanError(headline, where=_line(error, source)) from error


def _line(error: BaseException, source: str) -> str | None:
    """The file's line at which an error came up; None if that was elsewhere."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        lines.append((error.filename or "", error.lineno))
    file = Path(source).absolute()
    found = [line for name, line in lines if line and Path(name).absolute() == file]
    return f"{source}:{found[-1]}" if found else None


def _known_plans(folder: Path) -> str:
    names = sorted(p.name for p in folder.glob("*.py") if p.name != "__init__.py")
    return f"plans in {folder}: {', '.join(names) or 'none'}"
