"""What README.md shows is what running it prints."""

import re
import runpy
from pathlib import Path

README = Path("README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def test_the_spec_example_prints_what_is_shown(capsys, tmp_path):
    code = next(text for kind, text in BLOCKS if kind == "python" and "transition(" in text)
    shown = next(text for kind, text in BLOCKS if kind == "text" and "AllToAll" in text)
    path = tmp_path / "example.py"
    path.write_text(code)
    runpy.run_path(str(path))
    assert capsys.readouterr().out == shown


def test_the_plan_shown_is_the_plan_in_the_file():
    shown = next(text for kind, text in BLOCKS if kind == "python" and "def plan" in text)
    assert shown == Path("plans/vision_cp_ulysses.py").read_text()


def test_the_table_names_every_plan():
    files = {str(path) for path in Path("plans").glob("*.py") if path.name != "__init__.py"}
    assert set(re.findall(r"`(plans/\w+\.py)`", README)) == files
