"""Exports a run's checkpoint as a Hugging Face folder, or says what is in it; one process.

``python -m model.checkpoint export CHECKPOINT --out DIR [--dtype bfloat16]`` reads one tensor after
another, so it needs the memory of one file of the export. ``inspect CHECKPOINT`` tests all files.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoint.export import COST_FILE, RECORD_FILE
from model.checkpoint.facts import weights_facts
from model.checkpoint.folder import Checkpoint, check_checkpoint
from model.checkpoint.headers import CheckpointError, has_weights
from model.checkpoint.save_load import read_parameter, save_checkpoint
from model.checkpoint.steps import tested_run
from model.config import Config, ConfigError
from vlshard import ShardError
from vlshard.plan import fused_parameters
from vlshard.storage import Key, SavedFolder

DTYPES = ("float32", "bfloat16", "float16")
ERRORS = (ShardError, CheckpointError, ConfigError, OSError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status is 1 where a checkpoint cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m model.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write a Hugging Face folder")
    inspect = commands.add_parser("inspect", help="test all files, and say what is in them")
    for command in (export, inspect):
        command.add_argument("checkpoint", type=Path, help="a step's folder")
    export.add_argument("--out", type=Path, required=True, help="folder to write")
    export.add_argument("--dtype", choices=DTYPES, help="of all weights; default as --model has it")
    export.add_argument("--model", type=Path, help="default: the folder that the run began with")
    inspect.add_argument("--tensors", action="store_true", help="list them, with their norms")
    given = parser.parse_args(arguments)
    try:
        run = tested_run(given.checkpoint)
        if given.command == "export":
            write_export(given.checkpoint, run, given.out, given.dtype, given.model)
            print(f"step {run['step']} of run {run['id']} exported to {given.out}")
        else:
            print("\n".join(run_lines(given.checkpoint, run)))
            if given.tensors:
                list_tensors(given.checkpoint, run)
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write_export(
    folder: Path, run: dict[str, Any], out: Path, dtype: str | None, model: Path | None
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder.

    Args:
      folder: of the checkpoint.
      run: content of its run.json.
      out: folder to write; replaced if it is an export.
      dtype: of all weights, or None.
      model: folder that the run began with, if it is not where it was.
    Raises: CheckpointError if that folder is needed and gone, or is another one.
    """
    source = model or Path(run["model"]["folder"])
    if not source.is_dir():
        raise CheckpointError(f"{source}, where the model came from, is gone: say --model DIR")
    config, settings = Config.from_dict(run["config"]), run["settings"]
    if run["of_model"] and weights_facts(source) != run["model"]["files"]:
        raise CheckpointError(f"{source} has other weights than the run began with")
    layout = settings["expert_layout"]
    origin = check_checkpoint(source, config, layout) if has_weights(source) else None
    record = {"trained_by": "vlshard", "steps_done": run["step"], "settings": settings}
    extra = {RECORD_FILE: json.dumps(record, indent=2) + "\n"}
    if run["cost"]:
        extra[COST_FILE] = json.dumps(dict(zip("ab", run["cost"], strict=True))) + "\n"
    shapes = config.parameter_shapes()
    save_checkpoint(
        [(name, torch.empty(shape, device="meta")) for name, shape in shapes.items()],
        out,
        config,
        source=source,
        dtype=None if dtype is None else getattr(torch, dtype),
        expert_layout=layout,
        extra=extra,
        read=partial(_read, SavedFolder(folder), config, origin, frozenset(run["of_model"])),
    )


def run_lines(folder: Path, run: dict[str, Any]) -> list[str]:
    """What a checkpoint is of, in words."""
    settings, files, at = run["settings"], run["files"], run["position"]
    size = sum(facts["bytes"] for facts in files.values())
    trained = len(Config.from_dict(run["config"]).parameter_shapes()) - len(run["of_model"])
    return [
        f"{folder}: step {run['step']} of {run['steps']} of run {run['id']}",
        f"  {len(files)} files, {size:,} bytes, all as they were written",
        f"  {trained} parameters, {len(run['counts'])} of them with moments; "
        f"{len(run['of_model'])} as in {run['model']['folder']}",
        f"  data {settings['data']}: {run['data']['rows']} rows; "
        f"{at['passes']} passes and {at['rows']} rows of the next are read",
        f"  plan {settings['plan']} on {run['ranks']} ranks; batch {settings['batch']}",
        f"  rate {settings['lr']}, {settings['schedule']}; seed {settings['seed']}",
    ]


def list_tensors(folder: Path, run: dict[str, Any]) -> None:
    """Print shape, dtype, norm and steps of each tensor, one at a time."""
    config, saved = Config.from_dict(run["config"]), SavedFolder(folder)
    fused, left_out = fused_parameters(config), frozenset(run["of_model"])
    for name, shape in config.parameter_shapes().items():
        moments = (".exp_avg", ".exp_avg_sq") if name in run["counts"] else ()
        for kind in (*(() if name in left_out else ("",)), *moments):
            found = saved.read(Key(name, kind), shape, fused)
            steps = f", {run['counts'][name]} steps" if kind else ""
            dtype = str(found.dtype).removeprefix("torch.")
            print(f"{name}{kind} {list(shape)} {dtype}, norm {float(found.norm()):.6g}{steps}")


def _read(
    saved: SavedFolder,
    config: Config,
    origin: Checkpoint | None,
    of_model: frozenset[str],
    name: str,
) -> Tensor:
    """The whole of a parameter, from the checkpoint or from the folder that the run began with."""
    if name in of_model and origin is not None:
        return read_parameter(origin, name)
    return saved.read(Key(name), config.parameter_shapes()[name], fused_parameters(config))


if __name__ == "__main__":
    sys.exit(main())
