"""Where a line of a plan stands, for messages."""

from dataclasses import dataclass
from pathlib import Path

from vlshard.attention import Mode


@dataclass(frozen=True)
class Place:
    """Where a plan's line stands, for messages."""

    source: str
    name: str

    def of(self, text: str) -> str:
        """``plans/long.py:41 text.q``: file, line of the quoted text, and the name."""
        return self._line_with(f'"{text}"', f"'{text}'")

    def of_mode(self, site: str, mode: Mode) -> str:
        """``plans/long.py:44 attention``: where a site's mode is chosen."""
        made = f": {type(mode).__name__.lower()}("
        return self._line_with(f'"{site}"{made}', f"'{site}'{made}")

    def _line_with(self, *quoted: str) -> str:
        """The first line of the file that has one of these texts; without one, the file."""
        try:
            lines = Path(self.source).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return f"{self.source} {self.name}"
        found = (i for i, line in enumerate(lines, 1) if any(part in line for part in quoted))
        line = next(found, None)
        return f"{self.source}:{line} {self.name}" if line else f"{self.source} {self.name}"
