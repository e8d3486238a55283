"""What a checkpoint says of its run, and what must be as it says for the run to go on."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model.checkpoint import weights_facts
from model.config import Config
from model.data import RowFile
from model.training.fingerprints import flat
from model.training.settings import Settings
from vlshard.language import ShardError

# Settings that give other numbers, or other rows, from the step on at which they change.
FIXED = (
    "seed",
    "shuffle",
    "steps",
    "lr",
    "min_lr",
    "schedule",
    "warmup",
    "weight_decay",
    "decay",
    "lr_of",
    "clip",
    "dtype",
)


class ChangedRunError(ShardError):
    """A run that is asked to go on with something else than it began with."""


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint whose files were tested.

    Attributes:
      folder: of the checkpoint.
      run: content of its run.json.
    """

    folder: Path
    run: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self.run["step"]

    @property
    def id(self) -> str:
        """Of the run; it stays the same as long as it goes on."""
        return self.run["id"]

    @property
    def counts(self) -> dict[str, int]:
        """Steps of the optimizer by parameter; one that is not there has no moments."""
        return self.run["counts"]

    @property
    def of_model(self) -> frozenset[str]:
        """Parameters that are as --model has them, and so are not in the checkpoint."""
        return frozenset(self.run["of_model"])

    @property
    def cost(self) -> tuple[float, float] | None:
        """What a frame costs, if that was measured."""
        found = self.run["cost"]
        return None if found is None else (found[0], found[1])


def run_record(
    settings: Settings,
    config: Config,
    rows: RowFile,
    *,
    run: str,
    ranks: int,
    plan: str,
    cost: tuple[float, float] | None,
) -> dict[str, Any]:
    """What run.json says of a run that does not change from step to step.

    Args:
      settings: of the run.
      config: of the model.
      rows: the data.
      run: its id.
      ranks: how many there are.
      plan: text of the plan's file.
      cost: what a frame costs, if that was measured.
    """
    return {
        "id": run,
        "steps": settings.steps,
        "ranks": ranks,
        "settings": asdict(settings),
        "plan": plan,
        "cost": cost,
        "data": data_facts(rows),
        "model": {"folder": str(settings.model.resolve()), "files": weights_facts(settings.model)},
        "config": config.raw,
    }


def data_facts(rows: RowFile) -> dict[str, Any]:
    """What tells rows from others, and from themselves in another order."""
    return {"rows": len(rows), "checksum": rows.fingerprint}


def refuse_changes(saved: SavedRun, settings: Settings, config: Config, rows: RowFile) -> list[str]:
    """Refuse to go on with anything else than the run began with.

    Args:
      saved: the checkpoint.
      settings: of the run that is to go on.
      config: of its model.
      rows: its data.
    Returns: what differs all the same, where the settings ask for that.
    Raises: ChangedRunError that names each difference.
    """
    found = list(_changes(saved, settings, config, rows))
    if found and not settings.resume_anyway:
        notes = [*found, "fix: give what it was saved with, or add --resume-anyway"]
        raise ChangedRunError(f"{saved.folder} is of a run with other settings", notes=notes)
    return found


def _changes(saved: SavedRun, settings: Settings, config: Config, rows: RowFile) -> Iterator[str]:
    """Each difference in a line."""
    before: dict[str, Any] = saved.run["settings"]
    for name in FIXED:
        now = json.loads(json.dumps(getattr(settings, name)))
        if before.get(name) != now:
            yield f"--{name.replace('_', '-')} is {now}, it was {before.get(name)}"
    old, new = saved.run["data"], data_facts(rows)
    if old != new:
        texts = [f"{facts['rows']} rows, checksum {facts['checksum']}" for facts in (new, old)]
        yield f"--data has {texts[0]}; it had {texts[1]}"
    yield from _config_changes(Config.from_dict(saved.run["config"]), config)
    if saved.of_model and saved.run["model"]["files"] != weights_facts(settings.model):
        yield f"--model has other weights than {saved.run['model']['folder']} had"


def _config_changes(before: Config, now: Config) -> Iterator[str]:
    """Fields of the config that differ; what config.json says besides does not count."""
    old, new = (flat({k: v for k, v in asdict(c).items() if k != "raw"}) for c in (before, now))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"the config's {name} is {new.get(name)}, it was {old.get(name)}"
