"""The places that a run writes to: none is an input or another's, and each can be written to."""

import os
from pathlib import Path

from model.checkpoint import check_target, restore, try_target
from model.config import Config
from model.training.board import check_board
from model.training.metrics_file import check_metrics
from model.training.plot import check_picture
from model.training.report import say
from model.training.settings import Settings


class OutputError(OSError):
    """A place that cannot or must not be written to."""


def check_outputs(settings: Settings, config: Config, run: str | None = None) -> None:
    """Try all places at the start, on the rank that writes, so that no trained weights are lost.

    Args:
      settings: of the run; missing folders above its outputs are made.
      config: of the model, whose export must find room.
      run: id of the run that goes on here, whose metrics and picture may be there already.
    Raises: OSError or CheckpointError that says what is wrong with a place.
    """
    files = {"--metrics": settings.metrics, "--plot": settings.plot}
    for option, path in files.items():
        if path is not None:
            _check_apart(option, path, settings)
            _check_old(option, path, settings, run)
    if settings.metrics and settings.plot and _same(settings.metrics, settings.plot):
        raise OutputError(f"--metrics and --plot both name {settings.plot}")
    if settings.tensorboard:
        check_board()
    if settings.plot:
        check_picture(settings.plot)
    for path in filter(None, files.values()):
        _make_way(path)
        _try_file(path)
    if settings.save:
        _make_way(settings.save)
        if restore(settings.save):
            say(f"{settings.save}: an export was killed on its way; the one before it is back")
        _check_save(settings)
        try_target(settings.save, config, settings.model, settings.expert_layout)


def _check_apart(option: str, path: Path, settings: Settings) -> None:
    """Refuse to write over what is read, or into what is replaced."""
    inputs = {"--data": settings.data, "--plan": Path(settings.plan), "--eval": settings.eval}
    for other, read in inputs.items():
        if read is not None and _same(path, read):
            raise OutputError(f"{option} and {other} both name {path}: it would be overwritten")
    if settings.save and _inside(path, settings.save):
        where = f"{settings.save}, which --save replaces"
        raise OutputError(f"{option} {path} lies in {where}: name a file outside it")
    if path.exists() and _inside(path, settings.model):
        raise OutputError(f"{option} {path} is a file of --model: it would be overwritten")


def _check_old(option: str, path: Path, settings: Settings, run: str | None) -> None:
    """Refuse to replace what another run has written."""
    if run is not None and not settings.overwrite:
        if path == settings.metrics:
            check_metrics(path, run)
        return
    if path.is_file() and path.stat().st_size and not settings.overwrite:
        raise OutputError(f"{option} {path} exists: name another file, or add --overwrite")


def _check_save(settings: Settings) -> None:
    """Refuse to replace the model that is read, or what this program did not write."""
    assert settings.save is not None
    if _same(settings.save, settings.model) and not settings.overwrite:
        text = f"--save and --model both name {settings.save}"
        raise OutputError(f"{text}: name another folder, or add --overwrite to replace the model")
    check_target(settings.save, foreign=settings.overwrite)


def _make_way(path: Path) -> None:
    """Make the folders above a place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links is no OSError everywhere
        reason = error.strerror if isinstance(error, OSError) else None
        raise OutputError(f"{path} cannot be written to: {reason or error}") from error


def _try_file(path: Path) -> None:
    """Open a file as it will be; what was not there before is not there after."""
    new = not path.exists()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK  # a pipe without a reader fails
    try:
        os.close(os.open(path, flags, 0o666))
    except OSError as error:
        raise OutputError(f"{path} cannot be written to: {error.strerror}") from error
    if new:
        path.unlink()


def _same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one place."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return _resolved(one) == _resolved(other)


def _inside(path: Path, folder: Path) -> bool:
    """Whether a path is a folder, or lies in it."""
    place, found = _resolved(folder), _resolved(path)
    return place in (found, *found.parents)


def _resolved(path: Path) -> Path:
    """A path without links; one that loops stays as it is, to be refused where it is opened."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()
