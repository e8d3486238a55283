"""What the ranks of a run were given, compared by checksums before the model is made.

Paths may differ between nodes, so what lies under them is compared: every field of the config, the
files that tokens and pixels depend on, a checksum of each row of the data, how a few rows read, and
of each file of weights its size, its header and blocks spread over it. Not found is a weight that
differs between these blocks alone, and an image that differs without its size.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from model.checkpoint import weights_facts
from model.config import Config
from model.data import DATA_ERRORS, RowFile
from model.data.sample import content_of
from model.training.settings import Settings
from vlshard.comm import fingerprint, refuse_differences, together

SAMPLED = 4  # rows that are read
# What they hold is compared, or they are rank 0's own.
PATHS = (
    *("model", "data", "eval", "plan", "metrics", "plot", "tensorboard", "profile_dir"),
    *("checkpoint", "resume"),
)
WRITTEN = ("save", "checkpoint", "resume")  # of these it is compared whether they were given
# What makes tokens of text and pixels of images; config.json is compared field by field.
TEXT_FILES = ("*token*.json", "vocab.*", "merges.txt", "chat_template.*", "*processor_config.json")


def compare_settings(settings: Settings) -> None:
    """Refuse ranks with different command lines; every rank calls this, before anything else.

    Raises: AgreedError on every rank that names each option and who has which value.
    """
    told = {
        f"--{field.name.replace('_', '-')}": getattr(settings, field.name)
        for field in fields(settings)
        if field.name not in PATHS
    }
    given = {f"--{name}": getattr(settings, name) is not None for name in WRITTEN}
    refuse_differences({**told, **given})


def compare_inputs(settings: Settings, config: Config, data: Mapping[str, RowFile]) -> None:
    """Refuse ranks that read different configs, data, tokenizers or weights.

    Args:
      settings: of the run.
      config: of the model.
      data: each file of rows, by what its rows are called before the word.
    Raises: AgreedError on every rank that names what differs and on which ranks.
    """
    with together(OSError):
        told: dict[str, object] = {f"config {k}": v for k, v in flat(asdict(config)).items()}
        told |= weights_facts(settings.model)
        told |= {path.name: _whole(path) for path in _text_files(settings.model)}
        for kind, rows in data.items():
            told[f"{kind}rows"] = f"{len(rows)}, checksum {rows.fingerprint}"
            spread = _spread(len(rows))
            told |= {f"{kind}row {index} as tokens": _content(rows, index) for index in spread}
    refuse_differences(told)


def flat(tree: Mapping[str, Any], lead: str = "") -> dict[str, object]:
    """The leaves of nested dicts by dotted name."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= flat(cast("Mapping[str, Any]", value), f"{lead}{name}.")
        else:
            found[lead + name] = str(value)
    return found


def _spread(count: int) -> list[int]:
    """A few rows, the first and the last among them."""
    return sorted({int(place) for place in np.linspace(0, count - 1, SAMPLED)})


def _content(rows: RowFile, index: int) -> str:
    """Checksum of a row's tokens; what is wrong with a row is told when a step comes to it."""
    try:
        return f"{content_of(rows.row(index)[0]):08x}"
    except DATA_ERRORS:
        return "cannot be read"


def _text_files(folder: Path) -> list[Path]:
    """The files that tokens and pixels depend on."""
    return sorted({path for kind in TEXT_FILES for path in folder.glob(kind) if path.is_file()})


def _whole(path: Path) -> str:
    """Checksum of a small file."""
    return f"checksum {fingerprint(path.read_bytes())}"
