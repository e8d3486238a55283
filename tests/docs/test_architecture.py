"""The page of the architecture shows the code as it is."""

import re
from pathlib import Path

import pytest

from tests.docs.architecture import PICTURE, UP, draw

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = ("vlshard", "model", "")


def test_the_picture_shows_the_imports_and_none_goes_up():
    assert PICTURE.read_text() == draw(), "python -m tests.docs.architecture draws it anew"
    assert f'stroke="{UP}"' not in PICTURE.read_text()


def test_the_page_names_files_and_functions_that_are_there():
    named = re.findall(r"`((?:\w+/)+\w+\.\w+)(?:: (\w+))?`", PAGE.read_text())
    assert len(named) > 30
    for path, function in named:
        found = [ROOT / top / path for top in FOLDERS if (ROOT / top / path).is_file()]
        assert found, path
        assert not function or f"def {function}(" in found[0].read_text(), function


WINGS = sorted(
    path.parent for top in ("vlshard", "model") for path in (ROOT / top).glob("*/__init__.py")
)


@pytest.mark.parametrize("wing", WINGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_wing_speaks_of_files_that_it_has(wing):
    told = (wing / "__init__.py").read_text().split('"""')[1]
    named = set(re.findall(r"`([a-z_0-9]+)`", told))
    assert named, "a paragraph says what lives here, file by file"
    assert named <= {path.stem for path in wing.glob("*.py")}
