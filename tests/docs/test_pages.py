"""The pages of docs/ show what running them prints.

A page's Python blocks run in order, in one namespace; what one prints stands in the ``text`` block
right behind it. A block whose first line says ``torchrun --nproc-per-node N`` runs on N ranks, and
shows what rank 0 prints; one whose first line is ``# name.py`` is a module from there on. In a
``console`` block, output follows each ``$`` line.
``python tests/docs/test_pages.py`` writes what is printed into the pages.
"""

import contextlib
import io
import re
import shlex
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from vlshard.cli.main import main

PAGES = sorted(Path("docs").glob("*.md"))
SHOWN = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?|```console\n(.*?)```", re.DOTALL)
FILE = re.compile(r"# (\w+)\.py\n")
RANKS = re.compile(r"# .*torchrun --nproc-per-node (\d+) ")


def printed_by(code, names):
    """What a block prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "a block of the page", "exec"), names)
    return out.getvalue()


def printed_in_group(code):
    """What a block prints that starts and ends its own group, in a rank that has one."""
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        return printed_by(code, {})


@contextlib.contextmanager
def modules():
    """Takes blocks that are files: they can be imported until the page ends."""
    known = set(sys.modules)
    made = []

    def add(name, code):
        assert name not in known
        sys.modules[name] = types.ModuleType(name)
        made.append(name)
        return printed_by(code, vars(sys.modules[name]))

    try:
        yield add
    finally:
        for name in made:
            del sys.modules[name]


def rewritten(page, ranks):
    """The page with every output as it is now."""
    with modules() as add:
        return _rewritten(page, ranks, add)


def _rewritten(page, ranks, add):
    names = {"__name__": "__main__"}

    def block(found):
        code, _, console = found.groups()
        if console is not None:
            lines = [line for line in console.splitlines() if line.startswith("$ ")]
            return "```console\n" + "\n".join(line + "\n" + output(line) for line in lines) + "```"
        on_ranks = RANKS.match(code)
        if on_ranks:
            shown = ranks(int(on_ranks[1])).run(printed_in_group, code, timeout=60)[0]
        elif file := FILE.match(code):
            shown = add(file[1], code)
        else:
            shown = printed_by(code, names)
        return f"```python\n{code}```" + (f"\n```text\n{shown}```" if shown else "")

    return SHOWN.sub(block, page)


def output(line):
    """What a command line of the page prints."""
    program, *arguments = shlex.split(line.removeprefix("$ "))
    assert [program, *arguments[:2]] == ["python", "-m", "vlshard"], line
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(arguments[2:]) == 0
    return out.getvalue()


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_a_page_shows_what_running_it_prints(path, ranks):
    page = path.read_text()
    assert rewritten(page, ranks) == page, "python tests/docs/test_pages.py writes it anew"


def write_pages():
    sys.path.insert(0, "")
    from tests.dist.ranks import Ranks

    pools = {}
    for path in PAGES:
        new = rewritten(path.read_text(), lambda world: pools.setdefault(world, Ranks(world)))
        path.write_text(new)
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    write_pages()
