"""Draws docs/architecture.svg from the imports that the code really has.

``python -m tests.docs.architecture`` writes it; a test says when it is stale. Boxes stand in the
order of the lint contracts of pyproject.toml, the lowest first to be imported; an arc on the right
is an import downwards, faint where it follows from others; one upwards would be red, on the left.
"""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "architecture.svg"
CORES = "model cores"
WIDTH, LEFT, BOX, ROW, GAP = 980, 60, 640, 17, 14
DOWN, UP = "#4a6fa5", "#d03030"


@dataclass(frozen=True)
class Box:
    """A folder of the code, or the cores at the top of ``model``.

    Attributes:
      name: of the folder, as it is imported.
      about: the first sentence of what it says of itself.
      files: names of its files.
    """

    name: str
    about: str
    files: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The files, in lines that fit into a box."""
        lines = [""]
        for file in self.files:
            if len(lines[-1]) + len(file) > 88:
                lines.append("")
            lines[-1] += ("  " if lines[-1] else "") + file
        return lines

    @property
    def height(self) -> int:
        """Of its drawing [pixels]."""
        return ROW * (2 + len(self.lines)) + 8


def boxes() -> list[Box]:
    """All boxes, from the top one, which imports the others, to the bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = {
        c["layers"][0].split(".")[0]: c["layers"] for c in contracts["contracts"] if "layers" in c
    }
    found = [_box("plans", ROOT / "plans")]
    for layer in layers["model"]:
        found.append(_cores(layer) if ":" in layer else _box(layer, ROOT / layer.replace(".", "/")))
    return found + [_box(layer, ROOT / layer.replace(".", "/")) for layer in layers["vlshard"]]


def _box(name: str, folder: Path) -> Box:
    """A folder by its own words."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    return Box(name, text.partition("\n\n")[0].replace("\n", " "), tuple(files))


def _cores(layer: str) -> Box:
    """The pure functions at the top of ``model``."""
    files = [name.strip().removeprefix("model.") for name in layer.split(":")]
    return Box(
        CORES,
        "The model as pure functions on plain tensors; they know no mesh.",
        tuple(sorted(files)),
    )


def box_of(module: str, names: list[str]) -> str | None:
    """The box that a module lies in."""
    parts = module.split(".")
    for size in (2, 1):
        if (name := ".".join(parts[:size])) in names:
            return name
    return CORES if parts[0] == "model" and len(parts) > 1 else None


def imports(names: list[str]) -> Iterator[tuple[str, str]]:
    """(importing, imported) box of each import between boxes.

    What the top of ``vlshard`` hands on counts as the folder where it lives.
    """
    handed = _handed_on()
    for path in sorted(
        p for top in ("vlshard", "model", "plans") for p in (ROOT / top).rglob("*.py")
    ):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        here = box_of(module, names)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module or here is None:
                continue
            for alias in node.names:
                source = handed.get(alias.name, "") if node.module == "vlshard" else node.module
                there = box_of(source, names)
                if there and there != here:
                    yield here, there


def _handed_on() -> dict[str, str]:
    """For each name of ``vlshard``'s top level, the module that it comes from."""
    tree = ast.parse((ROOT / "vlshard" / "__init__.py").read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in nodes for alias in node.names}


def draw() -> str:
    """The picture."""
    found = boxes()
    names = [box.name for box in found]
    tops, y = {}, 12
    for box in found:
        tops[box.name] = y
        y += box.height + GAP
    arcs = sorted(set(imports(names)), key=lambda pair: tuple(map(names.index, pair)))
    drawn = [_drawn(box, tops[box.name]) for box in found]
    middles = {box.name: tops[box.name] + box.height // 2 for box in found}
    lines = [_arc(*pair, middles, names, faint=_follows(pair, arcs)) for pair in arcs]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-size="12">'
    marks = "".join(
        f'<marker id="{name}" markerWidth="7" markerHeight="6" refX="6" refY="3" orient="auto">'
        f'<path d="M0 0L7 3L0 6z" fill="{colour}"/></marker>'
        for name, colour in (("down", DOWN), ("up", UP))
    )
    ground = f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>'
    return "\n".join([head, f"<defs>{marks}</defs>", ground, *lines, *drawn, "</svg>", ""])


def _follows(pair: tuple[str, str], arcs: list[tuple[str, str]]) -> bool:
    """Whether an import follows from others, through a box in between."""
    here, there = pair
    reached, new = set(), {end for start, end in arcs if start == here and end != there}
    while new:
        reached |= new
        new = {end for start, end in arcs if start in new} - reached
    return there in reached


def _drawn(box: Box, top: int) -> str:
    """One box with its name, what it says of itself, and its files."""
    rows = [
        f'<text x="{LEFT + 12}" y="{top + ROW}" font-weight="bold">{escape(box.name)}</text>',
        f'<text x="{LEFT + 12}" y="{top + 2 * ROW}">{escape(box.about)}</text>',
    ]
    for i, line in enumerate(box.lines):
        at = top + (3 + i) * ROW
        rows.append(f'<text x="{LEFT + 12}" y="{at}" fill="#666">{escape(line)}</text>')
    fill = "#eef3fa" if box.name.startswith("vlshard") else "#f6f1e7"
    size = f'width="{BOX}" height="{box.height}"'
    frame = f'<rect x="{LEFT}" y="{top}" {size} rx="5" fill="{fill}" stroke="#999"/>'
    return f'<g font-family="sans-serif">{frame}{"".join(rows)}</g>'


def _arc(here: str, there: str, middles: dict[str, int], names: list[str], *, faint: bool) -> str:
    """An import, wider the further it goes."""
    down = names.index(there) > names.index(here)
    start, end = middles[here] + 6, middles[there] - 6
    side, way = (LEFT + BOX, 1) if down else (LEFT, -1)
    bend = side + way * (20 + (WIDTH - LEFT - BOX - 40) * min(abs(end - start) / 900, 1.0) * 1.25)
    colour, mark = (DOWN, "down") if down else (UP, "up")
    return (
        f'<path d="M{side} {start}C{bend:.0f} {start} {bend:.0f} {end} {side + way * 2} {end}" '
        f'fill="none" stroke="{colour}" stroke-opacity="{0.2 if faint else 1}" '
        f'marker-end="url(#{mark})"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(f"wrote {PICTURE}")
