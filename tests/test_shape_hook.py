"""What the shape hook refuses, in a module that it loads."""

import sys
from types import SimpleNamespace

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError

from tests import shape_hook

MODULE = '''"""Annotated."""
from dataclasses import dataclass
from functools import cached_property
from jaxtyping import Float, Int
from torch import Tensor

@dataclass(frozen=True)
class Pair:
    left: Float[Tensor, " n"]
    right: Float[Tensor, " n"]

    @cached_property
    def swapped(self) -> "Pair":
        return self.right

    @classmethod
    def twice(cls, x: Float[Tensor, " n"]) -> "Pair":
        return cls(x, x)

def product(x: Float[Tensor, "a b"], y: Float[Tensor, "b c"]) -> Float[Tensor, "a c"]:
    return x @ y if len(x) < 9 else x

def merge(x: Float[Tensor, "n c"], *, by: int) -> Float[Tensor, "n//{by} c"]:
    return x[::by] if len(x) < 9 else x

def first(x: Float[Tensor, " n"] | None, rows: list[Int[Tensor, " n"]]) -> int:
    return rows[0][0]

def shout(text: str) -> str:
    return text.upper() if text else 0
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shaped")
    (folder / "shaped_by_hook.py").write_text(MODULE)
    finder = shape_hook.Finder(["shaped_by_hook"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        patch.syspath_prepend(folder)
        import shaped_by_hook

        yield shaped_by_hook
        del sys.modules["shaped_by_hook"]
    assert not (folder / "__pycache__").exists()


def zeros(*shape):
    return torch.zeros(shape)


RIGHT = {
    "product": lambda m: m.product(zeros(2, 3), zeros(3, 4)),
    "again with other sizes": lambda m: m.product(zeros(5, 1), zeros(1, 2)),
    "inside another": lambda m: m.merge(m.product(zeros(4, 3), zeros(3, 2)), by=2),
    "dataclass": lambda m: m.Pair(zeros(3), zeros(3)),
    "classmethod": lambda m: m.Pair.twice(zeros(3)),
    "plain": lambda m: m.shout("a"),
}
WRONG = {
    "two sizes of one name": lambda m: m.product(zeros(2, 3), zeros(4, 5)),
    "dims": lambda m: m.product(zeros(2), zeros(2, 3)),
    "dtype": lambda m: m.product(zeros(2, 3).long(), zeros(3, 4)),
    "no tensor": lambda m: m.product([[1.0]], zeros(1, 4)),
    "result": lambda m: m.product(zeros(9, 3), zeros(3, 4)),
    "result computed from an argument": lambda m: m.merge(zeros(9, 2), by=2),
    "dataclass": lambda m: m.Pair(zeros(3), zeros(4)),
    "inside a property": lambda m: m.Pair.twice(zeros(3)).swapped,
    "inside a list": lambda m: m.first(zeros(3), [torch.arange(4)]),
    "result that is no int": lambda m: m.first(None, [torch.arange(4)]),
    "plain argument": lambda m: m.shout(3),
    "plain result": lambda m: m.shout(""),
}


@pytest.mark.parametrize("call", RIGHT.values(), ids=RIGHT)
def test_what_fits_passes(module, call):
    call(module)


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(module, call):
    with pytest.raises((TypeCheckError, BeartypeCallHintViolation)):
        call(module)


def test_an_error_of_the_function_itself_stays(module):
    x = SimpleNamespace()
    with pytest.raises(TypeCheckError, match="parameter x"):
        module.product(x, x)
    with pytest.raises(IndexError):
        module.first(None, [])


def test_the_modules_that_annotate_shapes_are_checked():
    names = shape_hook.shaped_modules()
    assert len(names) > 20
    loaded = [sys.modules[name] for name in names if name in sys.modules]
    assert {type(module.__loader__) for module in loaded} <= {shape_hook.Loader}
