"""Finds the config of a model, which this package knows nothing of: by its folder or by name."""

import importlib
import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from vlshard.language import PlanError, nearest
from vlshard.plan import ModelConfig

# Group of entry points: for each model_type, a function from a folder to a ModelConfig.
ENTRY_POINTS = "vlshard.models"


def config_of_folder(folder: str) -> ModelConfig:
    """The config of a Hugging Face folder, read by what is registered for its ``model_type``.

    Args:
      folder: has a ``config.json``.
    Raises: PlanError if there is none, or nothing installed reads that type.
    """
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: no valid JSON: {error}") from error
    kind = cast("dict[str, object]", raw).get("model_type") if isinstance(raw, dict) else None
    known = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    if not isinstance(kind, str) or kind not in known:
        offer = nearest(kind, known) if isinstance(kind, str) else ""
        raise PlanError(
            f"{path}: no model is installed that reads model_type {kind!r}{offer}",
            notes=[
                f"installed: {', '.join(known) or 'none'}",
                "--config module:function gives one",
            ],
        )
    note = f"it is registered as an entry point of {ENTRY_POINTS!r}"
    return _called(known[kind], folder, f"model_type {kind!r} ({known[kind]})", note)


def config_of(name: str, folder: str | None) -> ModelConfig:
    """What a function of the caller's gives for a model; this package knows no models.

    Args:
      name: ``module:function``, or an attribute that is a config.
      folder: what the function is called with, if there is one.
    Raises: PlanError if there is no such function, it fails, or it gives something else.
    """
    place, _, attribute = name.partition(":")
    if not place or not attribute:
        example = "for example model.config:load_config, with the folder that --model names"
        raise PlanError(f"--config takes module:function, not {name!r}", notes=[example])
    note = "it takes module:function, called with the folder that --model names"
    return _called(name, folder, f"--config {name}", note)


def _called(name: str, folder: str | None, told: str, note: str) -> ModelConfig:
    """The config that a function gives; errors name what asked for it, and what it takes."""
    place, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(place), attribute)
        config = found(folder) if folder else found() if callable(found) else found
    except (Exception, SystemExit) as error:
        headline = f"{told} gives no config: {type(error).__name__}: {error}"
        raise PlanError(headline, notes=[note]) from error
    if not isinstance(config, ModelConfig):
        raise PlanError(f"{told} gives a {type(config).__name__}, not a model's config")
    return config
