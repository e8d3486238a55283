"""The command line of the training program, as frozen settings."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self


class SettingsError(ValueError):
    """A command line that says nothing that can be done."""


@dataclass(frozen=True)
class Settings:
    """What to train, on what, and how; see ``--help`` for the meaning of each field."""

    plan: str
    model: Path
    data: Path
    steps: int
    batch: int
    micro_batch: int | None = None
    pack: bool = False
    lr: float = 1e-3
    min_lr: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    shuffle: bool = True
    dtype: str = "float32"
    freeze: tuple[str, ...] = ()
    expert_layout: str | None = None
    metrics: Path | None = None
    save: Path | None = None
    plot: Path | None = None
    device: str | None = None
    measure_cost: bool = False
    show_deal: bool = False

    @classmethod
    def from_command_line(cls, arguments: Sequence[str] | None = None) -> Self:
        """Parse a command line; None is the process's own.

        Raises: SettingsError if it is wrong (every rank has the same command line).
        """
        found = vars(_parser().parse_args(arguments))
        return cls(**{**found, "freeze": tuple(found["freeze"])})

    def lr_at(self, step: int) -> float:
        """Learning rate of a step (counted from 0): linear warm-up, then the schedule."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * done)) / 2


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit on every rank."""

    def error(self, message: str) -> NoReturn:
        usage = self.format_usage().splitlines()
        raise SettingsError("\n  ".join([message, *usage]))


def _number(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """A parser of finite numbers that are not below a bound."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number >= {least}")
        return value

    parse.__name__ = kind.__name__
    return parse


def _parser() -> argparse.ArgumentParser:
    count, natural, real = _number(int, 1), _number(int, 0), _number(float, 0)
    parser = _Parser(description="Train a Qwen3-VL-MoE from files, under a plan.")
    add = parser.add_argument
    add("--plan", required=True, help="plan file or module, such as plans/baseline_dp.py")
    add("--model", required=True, type=Path, help="Hugging Face folder; weights may be absent")
    add("--data", required=True, type=Path, help="JSONL file of chat or pre-tokenised rows")
    add("--steps", required=True, type=count, help="optimizer steps")
    add("--batch", required=True, type=count, help="rows of a step, over all ranks")
    add("--micro-batch", type=count, help="rows per data-parallel rank and forward; default all")
    add(
        "--pack",
        action="store_true",
        help="join the rows of a forward without padding, split as the plan splits rows",
    )
    add("--lr", type=real, default=1e-3, help="peak learning rate")
    add("--min-lr", type=real, default=0.0, help="where the cosine schedule ends")
    add("--schedule", choices=("constant", "cosine"), default="constant")
    add("--warmup", type=natural, default=0, help="steps of linear warm-up")
    add("--weight-decay", type=real, default=0.0)
    add("--clip", type=real, default=1.0, help="largest gradient norm; 0 does not clip")
    add("--seed", type=natural, default=0, help="of the row order and of new weights")
    add("--no-shuffle", dest="shuffle", action="store_false", help="take rows in file order")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    add(
        "--freeze",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help="parameters that are not trained, such as 'model.visual.*'",
    )
    add(
        "--expert-layout",
        choices=("released", "transposed"),
        help="how experts lie on disk, where their shape does not tell",
    )
    add("--metrics", type=Path, help="write one JSON object a step to this file")
    add("--save", type=Path, help="export a Hugging Face folder at the end")
    add("--plot", type=Path, help="draw loss and gradient norm into this picture")
    add(
        "--measure-cost",
        action="store_true",
        help="deal images by what a frame costs on rank 0: measured at the start, or as the model"
        " was saved with it; --save keeps it",
    )
    add(
        "--show-deal",
        action="store_true",
        help="print how many patches of the first step each rank gets, and their cost",
    )
    add("--device", choices=("cpu", "cuda", "npu"), help="default: cuda if there is any, else cpu")
    return parser
