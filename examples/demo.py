"""Train a small Qwen3-VL-MoE to read handwritten digits on two ranks, and let it read.

``python examples/demo.py`` makes the data, trains under a plan that cuts the vision tower's tokens
and the decoder's over both ranks, stops half-way, goes on from the checkpoint under another plan,
exports a Hugging Face checkpoint, and asks it to read digits of
scans it has not seen, in a process that knows transformers only.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
BATCH = 32
STAGE_SECONDS = 1800
LAST_STEPS = 50
MADE = ("train.jsonl", "model")  # what tells a folder that this program made


class StageError(RuntimeError):
    """A stage of the demo that ended badly."""


def run_stage(name: str, command: Sequence[str]) -> None:
    """Run a stage as a process of its own, its output shown as it comes.

    Args:
      name: what the stage does, for the message if it fails.
      command: arguments of Python.
    Raises: StageError if the stage ends with another status than 0 or takes too long.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            timeout=STAGE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StageError(f"to {name} took longer than {STAGE_SECONDS} s") from error
    if done.returncode:
        raise StageError(f"to {name} failed with status {done.returncode}; see its output above")
    print(f"took {time.perf_counter() - started:.1f} s to {name}", flush=True)


def make_room(out: Path) -> None:
    """Remove what an earlier demo left; anything else in the way is an error."""
    if out.exists() and any(out.iterdir()):
        if not all((out / name).exists() for name in MADE):
            raise StageError(f"{out} holds something that no demo made; name another folder")
        shutil.rmtree(out)


def train_command(options: argparse.Namespace, out: Path, *, first: bool) -> list[str]:
    """Arguments of Python that train on all ranks: the first half of the steps, or the rest."""
    half = {"stop-after": max(options.steps // 2, 1)} if first else {"resume": "auto"}
    settings = {
        "plan": options.plan if first else options.then_plan,
        "model": out / "model",
        "data": out / "train.jsonl",
        "steps": options.steps,
        "batch": BATCH,
        "lr": 2e-3,
        "schedule": "cosine",
        "weight-decay": 0.5,
        "decay": "all",
        "seed": options.seed,
        "metrics": out / "metrics.jsonl",
        "plot": out / "loss.png",
        "save": out / "export",
        "checkpoint": out / "checkpoints",
        "keep": 1,
        **half,
    }
    arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return ["-m", "model.training", "--ranks", str(RANKS), *arguments]


def read_command(out: Path) -> list[str]:
    """Arguments of Python that let the export read held-out digits."""
    settings = {
        "model": out / "export",
        "data": out / "heldout.jsonl",
        "noise": out / "noise.jsonl",
        "out": out / "reading.json",
    }
    arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return ["-I", "examples/read_digits.py", *arguments]


def rows_table(records: Sequence[dict[str, Any]]) -> Table:
    """What each rank worked on."""
    table = Table(title=f"rows per rank, over {len(records)} steps")
    for heading in ("rank", "vision rows (patches)", "a step", "text rows (tokens)", "a step"):
        table.add_column(heading, justify="right")
    for rank in range(len(records[0]["vision_rows"])):
        cells = [str(rank)]
        for key in ("vision_rows", "text_rows"):
            total = sum(record[key][rank] for record in records)
            cells += [f"{total:,}", f"{total / len(records):.1f}"]
        table.add_row(*cells)
    return table


def reading_table(reading: dict[str, Any]) -> Table:
    """What the exported model read."""
    table = Table(title="reading with plain transformers, greedy")
    for heading in ("images", "examples", "exact match", "digits read right"):
        table.add_column(heading, justify="right")
    for kind, name in (("heldout", "held-out scans"), ("noise", "noise (chance: 3 %, 10 %)")):
        found = reading[kind]
        scores = (f"{found[key]:.1%}" for key in ("exact_match", "digits_right"))
        table.add_row(name, str(found["examples"]), *scores)
    return table


def report(console: Console, options: argparse.Namespace, out: Path) -> None:
    """Print what was trained, how, and what it can do."""
    with open(out / "metrics.jsonl", encoding="utf-8") as lines:
        records = [found for found in map(json.loads, lines) if "loss" in found]
    reading = json.loads((out / "reading.json").read_text(encoding="utf-8"))
    last = records[-LAST_STEPS:]
    mean = sum(record["loss"] for record in last) / len(last)
    console.rule("result")
    console.print(
        f"ranks: {len(records[0]['vision_rows'])}    plan: {options.plan}, then {options.then_plan}"
    )
    console.print(rows_table(records))
    first, final = records[0]["loss"], records[-1]["loss"]
    console.print(
        f"loss: {first:.4f} at the start, {final:.4f} at the end "
        f"(mean of the last {len(last)} steps {mean:.4f})"
    )
    console.print(reading_table(reading))
    for example in reading["heldout"]["shown"]:
        console.print(f"  {example['truth']:>4} read as {example['answer']}", highlight=False)
    console.print(f"plot: {out / 'loss.png'}", f"checkpoint: {out / 'export'}", sep="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the data, the weights, the order")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--plan", default="plans/vision_cp_ulysses.py", help="file or module")
    other = "plans/vision_dp1.py"
    parser.add_argument("--then-plan", default=other, help="of the second half of the steps")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder, made anew")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    console = Console(soft_wrap=True)
    out = options.out if options.out.is_absolute() else ROOT / options.out
    rows = str(options.steps * BATCH)
    try:
        make_room(out)
        console.rule("data")
        seed = ["--seed", str(options.seed), "--train-rows", rows]
        run_stage("make the data", ["examples/digits.py", "--out", str(out), *seed])
        for first, plan in ((True, options.plan), (False, options.then_plan)):
            console.rule("training" if first else "going on under another plan")
            if (ROOT / plan).is_file():
                console.print(Syntax((ROOT / plan).read_text(encoding="utf-8"), "python"))
            name = "train the first half" if first else "train the second half"
            run_stage(name, train_command(options, out, first=first))
        console.rule("reading")
        run_stage("read", read_command(out))
    except StageError as error:
        console.print(f"error: {error}", style="bold red")
        return 1
    report(console, options, out)
    console.print(f"all in {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
