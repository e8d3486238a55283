"""The command line of the training program: options, their defaults, and what is wrong with one."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn


class SettingsError(ValueError):
    """Settings that contradict each other, or a command line that cannot be read."""


USAGE = (
    "usage: python -m model.training --plan PLAN --model DIR --data FILE --steps N --batch N"
    " [OPTION ...]; --help lists the options"
)


def parse(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The settings that a command line gives, by name.

    Args:
      arguments: the command line; None is the process's own.
    Raises: SettingsError if it is wrong.
    """
    found = vars(_parser().parse_args(arguments))
    found.pop(_GIVEN, None)
    several = {name: tuple(found[name]) for name in ("freeze", "lr_of")}
    return {**found, "steps": found["steps"] or 0, **several}


_GIVEN = "given more than once"


class _Once(argparse.Action):
    """Takes one value; a second one does not win silently."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given: dict[str, Any] = vars(namespace).setdefault(_GIVEN, {})
        if self.dest in given:
            both = f"{given[self.dest]} and {values}"
            parser.error(f"argument {option_string}: it is given more than once: {both}")
        given[self.dest] = values
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit on every rank."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}\n  {USAGE}")


class _Help(argparse.HelpFormatter):
    """Says every default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default in (None, argparse.SUPPRESS, []) or action.nargs == 0
        return action.help if plain or action.required else f"{action.help}; default %(default)s"


def _number(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """A parser of finite numbers that are not below a bound."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number >= {least}")
        return value

    parse.__name__ = kind.__name__
    return parse


def _positive(text: str) -> float:
    """A finite number above zero."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number > 0")
    return value


def _factor(text: str) -> tuple[str, float]:
    """A pattern of parameters, and by what their rate is multiplied."""
    pattern, _, factor = text.rpartition("=")
    if not pattern:
        raise argparse.ArgumentTypeError(f"{text} is not PATTERN=FACTOR, such as 'lm_head.*=0.1'")
    return pattern, _positive(factor)


def _span(text: str) -> tuple[int, int]:
    """A first and a last step."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text} is not FROM:TO, such as 3:5: steps from 1")
    return int(first), int(last)


_count, _natural, _real = _number(int, 1), _number(int, 0), _number(float, 0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m model.training",
        description="Train a Qwen3-VL-MoE from files, under a plan.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.register("action", None, _Once)
    _add_what(parser.add_argument_group("what is trained, on what"))
    _add_steps(parser.add_argument_group("steps"))
    _add_optimizer(parser.add_argument_group("optimizer: AdamW with betas 0.9 and 0.999, eps 1e-8"))
    _add_checkpoints(parser.add_argument_group("checkpoints, and going on from one"))
    _add_outputs(parser.add_argument_group("what is written, by rank 0"))
    _add_ranks(parser.add_argument_group("where and how it is computed"))
    return parser


def _add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--plan", required=True, help="plan file or module, such as plans/baseline_dp.py")
    add("--model", required=True, type=Path, help="Hugging Face folder; weights may be absent")
    add("--data", required=True, type=Path, help="JSONL file of chat or pre-tokenised rows")
    add("--check-data", action="store_true", help="read every row and image first; list all faults")
    add("--skip-bad", action="store_true", help="a row that cannot be used has no tokens")
    add("--eval", type=Path, metavar="FILE", help="rows to evaluate on, after the last step")
    add("--eval-every", type=_count, metavar="STEPS", help="evaluate after so many steps, too")
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


def _add_steps(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    length = group.add_mutually_exclusive_group(required=True)
    length.register("action", None, _Once)
    length.add_argument("--steps", type=_count, help="optimizer steps")
    length.add_argument("--epochs", type=_positive, help="passes over the data; 0.5 is half of one")
    add("--batch", required=True, type=_count, help="rows of a step, over all ranks")
    add("--micro-batch", type=_count, help="rows per data-parallel rank and forward; default all")
    add(
        "--reduce",
        choices=("every", "last"),
        default="every",
        help="after which of a step's micro-batches gradients are summed over ranks: the last one"
        " alone sends less and keeps whole gradients in memory",
    )
    add(
        "--pack",
        action="store_true",
        help="join the rows of a forward without padding, split as the plan splits rows",
    )
    add(
        "--aux-loss",
        action="store_true",
        help="add the load balance of the experts, times router_aux_loss_coef of the config",
    )
    add("--seed", type=_natural, default=0, help="of the row order and of new weights")
    add("--no-shuffle", dest="shuffle", action="store_false", help="take rows in file order")


def _add_optimizer(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--lr", type=_real, default=1e-5, help="peak learning rate")
    add(
        "--schedule",
        choices=("constant", "cosine"),
        default="constant",
        help="of the rate, after warm-up",
    )
    add("--min-lr", type=_real, default=0.0, help="where the cosine schedule ends")
    add(
        "--lr-of",
        nargs="+",
        action="extend",
        default=[],
        type=_factor,
        metavar="PATTERN=FACTOR",
        help="multiply the rate of parameters, such as 'model.visual.*=0.1'; the last that matches"
        " counts",
    )
    add("--warmup", type=_natural, default=0, help="steps of linear warm-up")
    add("--weight-decay", type=_real, default=0.0, help="AdamW's decoupled decay")
    add(
        "--decay",
        choices=("matrices", "all"),
        default="matrices",
        help="what it decays: parameters of two or more dims (embeddings and convolutions too), or"
        " norms and biases as well",
    )
    add("--clip", type=_real, default=1.0, help="largest gradient norm; 0 does not clip")


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="write checkpoints here, where a run stops")
    add("--checkpoint-every", type=_count, metavar="STEPS", help="and after so many steps")
    add("--checkpoint-async", action="store_true", help="from a copy, while training goes on")
    add("--keep", type=_count, metavar="N", help="how many checkpoints stay; default all")
    add(
        "--resume",
        type=Path,
        metavar="DIR|auto",
        help="go on from a checkpoint; auto: from the newest whole one in --checkpoint, if any",
    )
    add("--resume-anyway", action="store_true", help="go on with other data or other settings")
    add("--stop-after", type=_count, metavar="STEP", help="stop after this step of --steps")
    add(
        "--save-timeout",
        type=_real,
        default=3600.0,
        metavar="SECONDS",
        help="the longest that a rank waits for others to read or write weights",
    )
    add(
        "--timeout",
        type=_real,
        default=600.0,
        metavar="SECONDS",
        help="the longest that a rank waits for others in a step",
    )


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--save", type=Path, help="export a Hugging Face folder at the end, or at a signal")
    add("--metrics", type=Path, help="write one JSON object a step to this file")
    add(
        "--peak-flops",
        type=_real,
        default=0.0,
        metavar="FLOPS",
        help="what a device can do in a second, for its share in the metrics; 0 leaves it out",
    )
    add("--tensorboard", type=Path, metavar="DIR", help="write the metrics for TensorBoard, too")
    add("--plot", type=Path, help="draw loss and gradient norm into this picture")
    add(
        "--profile",
        type=_span,
        metavar="FROM:TO",
        help="record these steps, one torch trace a rank",
    )
    add("--profile-dir", type=Path, default=Path("profile"), metavar="DIR", help="for the traces")
    add(
        "--overwrite",
        action="store_true",
        help="replace a metrics file or picture of an earlier run, and a checkpoint that this"
        " program did not write or that --model names",
    )


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--dry-run",
        action="store_true",
        help="read and check everything, say what would be done, plan one step, and end",
    )
    add("--ranks", type=_count, help="start so many on this machine; default: torchrun's, or one")
    add(
        "--shutdown-timeout",
        type=_real,
        default=300.0,
        metavar="SECONDS",
        help="what ranks that --ranks started have to end after a signal",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the computation; weights, sums and optimizer stay float32",
    )
    add("--device", choices=("cpu", "cuda", "npu"), help="default: cuda if there is any, else cpu")
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
