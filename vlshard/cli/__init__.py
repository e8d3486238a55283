"""The command line, `python -m vlshard`: show a layout or a program, check a plan.

`main` has the commands, `arguments` reads what they are given, `models` finds a model's config;
`picture` says what is drawn, `show` draws it as text and `svg` as a file.
"""

from vlshard.cli.main import main

__all__ = [
    "main",
]
