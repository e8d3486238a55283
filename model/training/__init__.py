"""What a training program is made of, to be imported; `examples/train.py` is its front.

`settings` is the command line, frozen; `train` goes from settings to an exported model, through
`job` (what is read and checked first), `build` (the model), `trainer` (optimizer steps), `journal`
(what is shown and written down, with `display` and `plot`) and `export`. `launch` starts and ends
the ranks, `interruption` notes signals, `report` tells an error once, `measure` times a vision
block.

Only what needs no torch is handed on here, so that a command line is parsed, and `--help` answered,
before torch is imported; the rest is imported from its file.
"""

from model.training.interruption import INTERRUPTED, Interruption
from model.training.report import tell
from model.training.settings import Settings, SettingsError

__all__ = [
    "INTERRUPTED",
    "Interruption",
    "Settings",
    "SettingsError",
    "tell",
]
