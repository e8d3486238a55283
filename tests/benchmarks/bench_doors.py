"""Entering and leaving a split inside, beside the same collectives written by hand.

``make bench`` runs it. On two gloo ranks the doors of a block take turns with autograd functions as
Megatron has them, over messages with receives first, and over gloo's own collectives. A figure is
the time of one forward and backward, of the slowest rank; ratios are medians over rounds of the
time of one turn to that of the other in the same round. Results and gradients are equal bit for
bit, where a sum is of two terms.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.benchmarks.bench_language import swap, written
from tests.benchmarks.launch import inside_ranks, on_ranks
from vlshard import Mesh, Packing, transition
from vlshard.plan.doors import make_door

WIDTH = 512
SIZES = tuple((1 << 20) * 2**i for i in range(6))  # 1 MB to 32 MB sent by a rank
CUT, WHOLE = "b@dp.home s@tp m", "b@dp.home s m"
Call = Callable[[Tensor], Tensor]


def gather(x: Tensor, group: ProcessGroup, messages: bool) -> Tensor:
    """Tokens of all ranks, along dim 1."""
    n, me = group.size(), group.rank()
    out = x.new_empty((x.shape[0], n * x.shape[1], x.shape[2]))
    if messages:
        parts = [x if k == me else torch.empty_like(x) for k in range(n)]
        swap(parts, [x] * n, group)
    else:
        flat = x.new_empty((n * x.shape[0], *x.shape[1:]))
        dist.all_gather_single(flat, x, group=group)
        parts = flat.chunk(n)
    return torch.cat(parts, 1, out=out)


def reduce_scatter(x: Tensor, group: ProcessGroup, messages: bool) -> Tensor:
    """This rank's part of dim 1, summed over ranks."""
    n, me = group.size(), group.rank()
    parts = x.chunk(n, 1)
    if not messages:
        out = torch.empty_like(parts[me], memory_format=torch.contiguous_format)
        dist.reduce_scatter_single(out, torch.cat(parts), group=group)
        return out
    terms = [torch.empty(part.shape) for part in parts]
    swap(terms, [part.contiguous() for part in parts], group)
    terms[me] = parts[me]
    out = terms[0] + terms[1]
    for term in terms[2:]:
        out += term
    return out


class Gather(torch.autograd.Function):
    """Gathers tokens; sums gradients and scatters them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        return gather(x, *how)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad_outputs[0], *ctx.how), None, None


class ReduceScatter(torch.autograd.Function):
    """Sums tokens and scatters them; gathers gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        return reduce_scatter(x, *how)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return gather(grad_outputs[0], *ctx.how), None, None


def doors(mesh: Mesh, batch: int, length: int) -> tuple[Call, Call]:
    """Enter and leave, for so many tokens in all."""
    enter, leave = transition(CUT, WHOLE, mesh), transition(f"{WHOLE} + tp", CUT, mesh)
    sizes = {"b": Packing([1] * batch, home=[0] * batch), "s": length, "m": WIDTH}
    door = make_door((enter, leave), mesh, sizes)
    return door.enter, door.leave


def race(batch: int, rounds: int) -> None:
    """Both ways at every size, in turns; rank 0 prints."""
    mesh = Mesh(dp=1, tp=dist.get_world_size())
    group = mesh.group(["tp"])
    for size in SIZES:
        own = size // (4 * WIDTH * batch)
        enter, leave = doors(mesh, batch, own * mesh.size)
        ways: dict[str, tuple[int, list[Call]]] = {
            "enter": (own, [enter, *(hand(Gather, group, m) for m in (True, False))]),
            "leave": (
                own * mesh.size,
                [leave, *(hand(ReduceScatter, group, m) for m in (True, False))],
            ),
        }
        for name, (rows, calls) in ways.items():
            x = torch.randn(batch, rows, WIDTH, requires_grad=True)
            times = turns(calls, x, group, rounds)
            if dist.get_rank() == 0:
                tell(f"{name}, {batch} rows", size, times)


def hand(function: Any, group: ProcessGroup, messages: bool) -> Call:
    """One of the functions written by hand."""
    return lambda x: function.apply(x, group, messages)


def turns(calls: list[Call], x: Tensor, group: ProcessGroup, rounds: int) -> Tensor:
    """Seconds of each call in each round, the slowest rank's."""
    weight = torch.randn_like(calls[0](x.detach()))
    results = [both(call, x, weight) for call in calls]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    del results
    times = torch.zeros(len(calls), rounds)
    for turn in range(rounds):
        for i in range(len(calls)):
            number = (turn + i) % len(calls)
            dist.barrier(group)
            start = time.perf_counter()
            both(calls[number], x, weight)
            times[number, turn] = time.perf_counter() - start
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times


def both(call: Call, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the gradient."""
    y = call(x)
    return y.detach(), torch.autograd.grad(y, x, weight)[0]


def tell(name: str, size: int, times: Tensor) -> None:
    """A line of the table."""
    ms = [statistics.median(row.tolist()) * 1e3 for row in times]
    ratios = [float((times[0] / other).median()) for other in times[1:]]
    line = f"{name:15}{written(size):>8}" + "".join(f"{x:10.2f}" for x in ms)
    print(line + "".join(f"{ratio:12.2f}" for ratio in ratios), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    if not inside_ranks():
        arguments = ["--rounds", str(rounds)]
        print(f"{'forward, backward':15}{'sent':>6}{'door':>10}{'messages':>10}{'gloo':>10} ms")
        print(f"{'':53}{'to messages':>12}{'to gloo':>12}")
        print(on_ranks("tests.benchmarks.bench_doors", arguments), end="")
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for batch in (1, 2):
        race(batch, rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
