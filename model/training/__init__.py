"""The training program, `python -m model.training`, and what it is made of, to be imported.

`settings` are frozen, `command_line` reads them. `train` goes from settings to an exported model:
`job` (what is read and checked first, with `outputs`, the places that are written to), `build` (the
model), `trainer` (optimizer steps), `journal` (what is shown and written down, with `record`,
`display` and `plot`) and `export`. `program` is the front: `ranks` starts the ranks of a machine,
`launch` joins and ends one, `interruption` takes signals, `report` says things once, `measure`
times a vision block.

Only what needs no torch is handed on here, so that a command line is parsed, and `--help` answered,
before torch is imported; the rest is imported from its file.
"""

from model.training.interruption import Interruption
from model.training.report import tell
from model.training.settings import Settings, SettingsError

__all__ = [
    "Interruption",
    "Settings",
    "SettingsError",
    "tell",
]
