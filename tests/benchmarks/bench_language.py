"""What the language costs: reading, planning, carrying out; in one run, as tables.

``make bench`` runs it. On two gloo ranks, ``reshard`` takes turns with the same collective written
by hand in its fastest form (messages with receives first, into their places; an all-to-all and a
sum for a reduce-scatter) and with ``DTensor.redistribute``. Ratios are medians over rounds of the
time of one turn to that of another in the same round, each the slowest rank's. Nothing is checked
for types here, and each process has one thread.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from vlshard import Mesh, MeshShape, Packing, layout, reshard, spec, transition

WIDTH = 16
SIZES = tuple(4096 * 4**i for i in range(8))  # 4 KB to 64 MB
# Step: arrow, local rows for each row sent, and DTensor's placements before and after.
STEPS: dict[str, tuple[str, int, Any, Any]] = {
    "AllToAll": ("s@cp h d -> s h@cp d", 2, Shard(0), Shard(1)),
    "AllGather": ("s@cp h d -> s h d", 1, Shard(0), Replicate()),
    "ReduceScatter": ("s h d + cp -> s@cp h d", 2, Partial(), Shard(0)),
    "AllReduce": ("s h d + cp -> s h d", 1, Partial(), Replicate()),
}
COPIES = {
    "aten.clone.default": "what is sent has to be contiguous, and what is summed in place a copy",
    "aten.cat.default": "pieces that have come from several ranks become one tensor",
    "aten.copy_.default": "a piece is put in its place",
    "aten.index_select.default": "rows that are not consecutive are collected",
    "aten.index_copy_.default": "rows that are not consecutive are put in their places",
    "aten.index_add_.default": "terms are summed in their places",
    "aten.add_.Tensor": "terms are summed",
    "aten.add.Tensor": "terms are summed",
    "aten._to_copy.default": "half-precision terms are summed in fp32",
}


def by_hand(step: str, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A step over a group of all ranks, written with torch alone."""
    n, me = dist.get_world_size(), dist.get_rank()
    match step:
        case "AllToAll":
            parts = x.chunk(n, 1)
            out = x.new_empty((n * x.shape[0], x.shape[1] // n, x.shape[2]))
            places = out.chunk(n)
            places[me].copy_(parts[me])
            swap(places, [part.contiguous() for part in parts], group)
            return out
        case "AllGather":
            out = x.new_empty((n * x.shape[0], *x.shape[1:]))
            places = out.chunk(n)
            places[me].copy_(x)
            swap(places, [x] * n, group)
            return out
        case "ReduceScatter":
            parts = x.chunk(n)
            terms = [x.new_empty(part.shape) for part in parts]
            swap(terms, parts, group)
            out = parts[me].clone()
            for k in range(n):
                if k != me:
                    out += terms[k]
            return out
        case _:
            out = x.clone()
            dist.all_reduce(out, group=group)
            return out


def swap(places: Sequence[Tensor], parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send a part to every other rank and receive one, receives first."""
    others = [k for k in range(len(parts)) if k != dist.get_rank()]
    receives = [dist.P2POp(dist.irecv, places[k], k, group) for k in others]
    sends = [dist.P2POp(dist.isend, parts[k], k, group) for k in others]
    for work in dist.batch_isend_irecv([*receives, *sends]):
        work.wait()


def contenders(step: str, mesh: Mesh) -> dict[str, Callable[[Tensor], Tensor]]:
    """The three ways to carry out a step, through the same group."""
    arrow, _, before, after = STEPS[step]
    group = mesh.group(["cp"])
    devices = DeviceMesh.from_group(group, "cpu")

    def dtensor(x: Tensor) -> Tensor:
        held = DTensor.from_local(x, devices, [before], run_check=False)
        return held.redistribute(placements=[after]).to_local()

    return {
        "reshard": lambda x: reshard(x, arrow, mesh),
        "hand": lambda x: by_hand(step, x, group),
        "DTensor": dtensor,
    }


def race(rank: int, folder: str, sizes: Sequence[int], rounds: int) -> None:
    """One of two ranks: every step at every size, in turns; rank 0 prints."""
    warnings.filterwarnings("ignore")  # DTensor says that it has no all-to-all on the CPU
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/race", rank=rank, world_size=2)
    mesh = Mesh(cp=2)
    if rank == 0:
        print(f"\n{'2 ranks, gloo':15}{'sent':>10}{'reshard':>10}{'by hand':>10}{'DTensor':>10} ms")
        print(f"{'':55}  to hand  to DTensor")
    with torch.no_grad():
        for step in STEPS:
            ways = contenders(step, mesh)
            for size in sizes:
                rows = STEPS[step][1] * size // (4 * 2 * WIDTH)
                x = torch.randn(rows, 2, WIDTH)
                times = turns(ways, x, mesh.group(["cp"]), rounds)
                if rank == 0:
                    tell(step, size, times)
    if rank == 0:
        print(f"\n{'2 ranks, gloo':15}{'sent':>10}{'copied':>10}   bytes, and why they are copied")
    for step in STEPS:
        copies(step, mesh)
    dist.destroy_process_group()


def turns(
    ways: dict[str, Callable[[Tensor], Tensor]], x: Tensor, group: dist.ProcessGroup, rounds: int
) -> dict[str, Tensor]:
    """Seconds of each round by way, the slowest rank's."""
    results = [way(x) for way in ways.values()]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    del results
    times = {name: torch.zeros(rounds) for name in ways}
    names = list(ways)
    for turn in range(rounds):
        for name in names[turn % 3 :] + names[: turn % 3]:
            dist.barrier(group)
            start = time.perf_counter()
            ways[name](x)
            times[name][turn] = time.perf_counter() - start
    for seconds in times.values():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return times


def tell(step: str, size: int, times: dict[str, Tensor]) -> None:
    """A line of the table."""
    medians = [float(times[name].median()) * 1e3 for name in ("reshard", "hand", "DTensor")]
    ratios = [float((times["reshard"] / times[name]).median()) for name in ("hand", "DTensor")]
    line = f"{step:15}{written(size):>10}" + "".join(f"{ms:10.3f}" for ms in medians)
    print(f"{line}{ratios[0]:9.2f}{ratios[1]:12.2f}", flush=True)


def written(size: int) -> str:
    """``64 MB``."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


class Copied(TorchDispatchMode):
    """Counts the bytes that operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry an operation out; count it if it writes elements."""
        result = func(*args, **(kwargs or {}))
        if str(func) in COPIES:
            self.bytes[str(func)] += result.numel() * result.element_size()
        return result


def copies(step: str, mesh: Mesh) -> None:
    """Bytes that one call copies beside those that it sends."""
    arrow, whole, *_ = STEPS[step]
    x = torch.randn(whole * 1024, 2, WIDTH)
    reshard(x, arrow, mesh)
    with torch.no_grad(), Copied() as copied:
        reshard(x, arrow, mesh)
    rows = 1024 * (whole if "s h d +" in arrow else 2 * whole)
    src, dst = arrow.split("->")
    sent = transition(src, dst, mesh).bytes_sent(s=rows, h=2, d=WIDTH).forward
    if mesh.rank == 0:
        print(f"{step:15}{sent:10,}{copied.bytes.total():10,}")
        for name, amount in sorted(copied.bytes.items()):
            print(f"{'':25}{amount:10,}   {COPIES[name]}")


def overheads(rounds: int) -> None:
    """Time that ``reshard`` adds to the same calls by hand, where sending costs nothing."""
    print(f"\n{'fake backend':15}{'ranks':>10}{'reshard':>10}{'by hand':>10}{'added':>10} us")
    for step, (arrow, *_) in STEPS.items():
        for ranks in (2, 8, 32):
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            mesh, x = Mesh(cp=ranks), torch.randn(ranks, ranks, 4)
            pairs = [one_of_each(step, arrow, mesh, x) for _ in range(rounds)]
            ours, hand = (statistics.median(times) for times in zip(*pairs, strict=True))
            print(f"{step:15}{ranks:10}{ours:10.1f}{hand:10.1f}{ours - hand:10.1f}")
            dist.destroy_process_group()


def one_of_each(step: str, arrow: str, mesh: Mesh, x: Tensor) -> tuple[float, float]:
    """Microseconds of one call of ``reshard`` and one by hand."""
    group = mesh.group(["cp"])
    with torch.no_grad():
        start = time.perf_counter()
        reshard(x, arrow, mesh)
        between = time.perf_counter()
        by_hand(step, x, group)
        return (between - start) * 1e6, (time.perf_counter() - between) * 1e6


def microseconds(call: Callable[[int], object], rounds: int) -> float:
    """Median time of a call, which gets a number that it has not had before."""
    times: list[float] = []
    for number in range(1, rounds + 1):
        start = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def host(rounds: int) -> None:
    """What is done on the host, before anything is sent."""
    mesh, large = MeshShape(dp=2, cp=4), MeshShape(dp=256, cp=(16, 16))
    arrow = "b@dp s@cp h d", "b@dp s h@cp d"
    pack = "(img@dp.home s)@cp c"

    def images(n: int) -> Packing:
        return Packing([4 * (n % 50 + 1), 8, 24], unit=4, home=[0, 1, 1])

    def bind_large(n: int) -> object:
        where = layout("b@dp s@cp.0 h@cp.1 d", large, b=512, s=16 * n, h=32, d=64)
        return where.local_shape(n % large.size)

    calls: dict[str, Callable[[int], object]] = {
        "parse, cold": lambda n: spec(f"b@dp s@cp.zigzag h{n} d + tp"),
        "parse, cached": lambda n: spec("b@dp s@cp.zigzag h d + tp"),
        "bind, cold": lambda n: layout(arrow[0], mesh, b=4, s=8 * n, h=8, d=64),
        "bind, cached": lambda n: layout(arrow[0], mesh, b=4, s=64, h=8, d=64),
        "bind a pack, cold": lambda n: layout(pack, mesh, img=images(n), c=n),
        "bind and one rank's shape, 65,536 ranks": bind_large,
        "plan, cold": lambda n: transition(f"{arrow[0]}{n}", f"{arrow[1]}{n}", mesh),
        "plan, cached": lambda n: transition(*arrow, mesh),
    }
    print(f"{'on the host':42}us")
    for name, call in calls.items():
        print(f"{name:40}{microseconds(call, rounds):8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--largest", type=int, default=64, help="MB sent in the largest step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    host(max(options.rounds, 200))
    overheads(max(options.rounds, 200))
    sizes = [size for size in SIZES if size <= options.largest << 20]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(race, (folder, sizes, options.rounds), nprocs=2)


if __name__ == "__main__":
    main()
