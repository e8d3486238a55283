"""Checks shapes and types at run time, in the modules that annotate shapes.

The other modules compute on the host with plain types, which the static checker has seen; a check
at run time would make each of their calls take several times as long.
"""

from pathlib import Path

from jaxtyping import install_import_hook

ROOT = Path(__file__).parents[1]
PACKAGES = ("vlshard", "model", "plans")


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
    install_import_hook(shaped_modules(), "beartype.beartype")
