"""The command line: pictures of layouts and programs, and checks of plans."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vlshard.cli.arguments import Segments, complete, read_mesh, read_numbers, read_sizes, written
from vlshard.cli.models import ENTRY_POINTS, config_of, config_of_folder
from vlshard.cli.picture import MOST_COUNTED
from vlshard.cli.show import rendered, show
from vlshard.cli.svg import draw
from vlshard.language import (
    LayoutError,
    MeshShape,
    Packing,
    PlanError,
    ShardError,
    Spec,
    arrow,
    layout,
    spec,
)
from vlshard.plan import (
    describe_storage,
    idle_axes,
    load_plan,
    padding_remarks,
    split_remarks,
    unused_axes,
)
from vlshard.programs import transition

WRONG = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
      arguments: what stands behind ``python -m vlshard``; None takes it from the process.
    Returns: the exit status: 0, 1 for a plan that does not fit, 2 for wrong input.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except ShardError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except MemoryError:
        print("MemoryError: these sizes are too large to be drawn", file=sys.stderr)
    return WRONG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vlshard", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_show(commands.add_parser("show", help="draw who holds what of a tensor"))
    _add_check(commands.add_parser("check", help="check a plan against a model"))
    return parser


def _add_show(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("spec", help="a layout 'b s@cp h d', or two and what leads from one to the other: 'A -> B'")
    add(
        "--mesh",
        default="",
        help="dp=2,cp=4; with parts cp=2x4 or cp=ring:2/ulysses:4; else one rank",
    )
    add("--sizes", default="", help="s=16,h=8; other dims get two rows for each part")
    add("--lengths", help="24,16,48: segments of the first bracket of two names")
    add("--unit", type=int, default=1, help="rows of a segment that no cut parts")
    add("--home", help="0,0,1: where segments (or rows) marked .home are")
    add("--cost", default="0,1", help="a,b: what a segment of n rows costs, a n^2 + b n")
    add("--itemsize", type=int, default=4, help="bytes of one element that is sent; default 4")
    add("--svg", type=Path, metavar="FILE", help="write a picture to a file instead")
    parser.set_defaults(command=_show)


def _add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", help="file or module that defines plan(world)")
    add("--world", type=int, required=True, help="number of ranks")
    add("--storage", action="store_true", help="print how each kind of parameter is stored")
    add("--model", help="folder of the model; its config.json says which model it is")
    add(
        "--config",
        help="module:function that gives the model's config, called with the folder; default: "
        f"what is registered as {ENTRY_POINTS!r} for the folder's model_type",
    )
    parser.set_defaults(command=_check)


def _show(options: argparse.Namespace) -> int:
    """Draw a layout, or two and the program between them."""
    mesh = read_mesh(options.mesh)
    is_arrow = "->" in options.spec
    sides = arrow(options.spec) if is_arrow else (spec(options.spec),)
    sizes = complete(sides, mesh, read_sizes(options.sizes), _segments(options))
    layouts = [layout(side, mesh, where=None, **sizes) for side in sides]
    program = _program(sides, mesh, sizes, options.itemsize) if is_arrow else ""
    if options.svg:
        _write(options.svg, draw(layouts, program))
        return 0
    lines = show(layouts, program)
    print(f"sizes: {written(sizes)}\n")
    print(rendered(lines, colour=_has_colour()))
    return 0


def _program(
    sides: Sequence[Spec], mesh: MeshShape, sizes: Mapping[str, int | Packing], itemsize: int
) -> str:
    """The program between two layouts, with the bytes that ranks send."""
    src, dst = sides
    if "itemsize" in sizes:
        note = "what is sent is counted with itemsize= beside the sizes: name the dim otherwise"
        raise LayoutError("no dim of an arrow can be named 'itemsize' here", notes=[note])
    program = transition(src, dst, mesh, where=None, **sizes)
    if mesh.size <= MOST_COUNTED:
        return program.describe(itemsize=itemsize, **sizes)
    forward, backward = program.bytes_sent(rank=0, itemsize=itemsize, **sizes)
    return f"{program}\n  rank 0 sends {forward:,} bytes, in backward {backward:,}"


def _segments(options: argparse.Namespace) -> Segments:
    """What the options say of segments."""
    lengths, home = (
        None if text is None else read_numbers(text, option, int)
        for option, text in (("--lengths", options.lengths), ("--home", options.home))
    )
    cost = read_numbers(options.cost, "--cost", float)
    if len(cost) != 2:
        note = "a segment of n rows costs a n^2 + b n"
        raise LayoutError("--cost takes two numbers: 'a,b'", notes=[note])
    return Segments(lengths, options.unit, home, (cost[0], cost[1]))


def _has_colour() -> bool:
    """Whether the output is a terminal that shows colours and may be sent some."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def _write(path: Path, text: str) -> None:
    """Write a picture."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LayoutError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}")


def _check(options: argparse.Namespace) -> int:
    """Check a plan against a model and a world, without ranks or devices."""
    if options.world < 1:
        raise PlanError(f"--world is a number of ranks, at least 1, not {options.world}")
    plan = load_plan(options.plan, options.world)
    if options.config:
        config = config_of(options.config, options.model)
    elif options.model:
        config = config_of_folder(options.model)
    else:
        raise PlanError("which model? --model names its folder, or --config gives its config")
    faults = list(plan.faults(config, options.world))
    for fault in faults:
        print(f"{type(fault).__name__}: {fault}")
    if not faults:
        print(f"{options.plan} fits: {options.world} ranks as {plan.mesh}")
        bound = plan.bind(config, options.world)
        remarks = [
            *unused_axes(plan.layouts, plan.params, plan.mesh, plan.splits),
            *idle_axes(plan.attention, plan.layouts, plan.mesh, config),
        ]
        for remark in (*remarks, *split_remarks(bound), *padding_remarks(bound)):
            print(f"  {remark}")
        if options.storage:
            print(describe_storage(bound))
    return int(bool(faults))
