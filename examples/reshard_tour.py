"""Three ways to compute on four ranks, each in a few lines of ``reshard``, equal to one process.

``python examples/reshard_tour.py`` starts four ranks; ``torchrun --nproc-per-node 4`` works too.
The values and the gradient of every input are compared with one process that computes the whole.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vlshard import Layout, Mesh, layout, reshard, spec

RANKS = 4
TOLERANCE = 1e-12  # fp64, sums in another order


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of whole sequences, in one process."""
    heads = (rearrange(x, "b s h d -> b h s d") for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, is_causal=True)
    return rearrange(out, "b h s d -> b s h d")


def ulysses_attention(mesh: Mesh, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sequences are cut over cp: trade positions for heads, attend, trade back."""
    q, k, v = (reshard(x, "b s@cp h d -> b s h@cp d", mesh) for x in (q, k, v))
    return reshard(attention(q, k, v), "b s h@cp d -> b s@cp h d", mesh)


def mlp(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """A two-layer perceptron in one process."""
    return F.linear(F.gelu(F.linear(x, w_in)), w_out)


def megatron_mlp(mesh: Mesh, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Both weights are cut over the hidden width f, and x over positions, on the same ranks."""
    x = reshard(x, "b s@tp m -> b s m", mesh)
    terms = mlp(x, w_in, w_out)  # each rank has a term of the sum over f: b s m + tp
    return reshard(terms, "b s m + tp -> b s@tp m", mesh)


def fsdp_linear(mesh: Mesh, x: Tensor, w: Tensor) -> Tensor:
    """Rows of x and of w are cut over dp: gather w, use it; its gradient is summed and cut."""
    return F.linear(x, reshard(w, "o@dp i -> o i", mesh, o=10))


@dataclass(frozen=True)
class Stop:
    """A parallel function and what it has to equal.

    Attributes:
      name: what it is called.
      parallel: the function of a mesh and of this rank's parts.
      whole: the function of whole tensors.
      axis: the mesh axis over all ranks.
      inputs: layout of each input.
      output: layout of the result.
      sizes: size of each dim.
    """

    name: str
    parallel: Callable[..., Tensor]
    whole: Callable[..., Tensor]
    axis: str
    inputs: tuple[str, ...]
    output: str
    sizes: Mapping[str, int]


STOPS = (
    Stop(
        "Ulysses attention",
        ulysses_attention,
        attention,
        "cp",
        ("b s@cp h d",) * 3,
        "b s@cp h d",
        {"b": 2, "s": 12, "h": 8, "d": 16},
    ),
    Stop(
        "Megatron MLP",
        megatron_mlp,
        mlp,
        "tp",
        ("b s@tp m", "f@tp m", "m f@tp"),
        "b s@tp m",
        {"b": 2, "s": 12, "m": 24, "f": 40},
    ),
    Stop(
        "FSDP of a linear",
        fsdp_linear,
        F.linear,
        "dp",
        ("b@dp i", "o@dp i"),
        "b@dp o",
        {"b": 8, "i": 12, "o": 10},
    ),
)


def visit(stop: Stop) -> float:
    """Compute in parallel and in one process.

    Args:
      stop: what to compute.
    Returns: the largest difference of a value or a gradient on any rank.
    """
    mesh = Mesh(**{stop.axis: dist.get_world_size()})
    make = torch.Generator().manual_seed(0)
    where = [bind(text, mesh, stop.sizes) for text in (*stop.inputs, stop.output)]
    *whole, weight = (torch.randn(w.shape, generator=make, dtype=torch.float64) for w in where)
    parts = [held(x, w).requires_grad_() for x, w in zip(whole, where, strict=False)]
    whole = [x.requires_grad_() for x in whole]

    found, wanted = stop.parallel(mesh, *parts), stop.whole(*whole)
    (found * held(weight, where[-1])).sum().backward()
    (wanted * weight).sum().backward()

    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(parts, whole, strict=True))]
    off = [
        (mine.detach() - held(all_of_it, w)).abs().max()
        for (mine, all_of_it), w in zip(pairs, (where[-1], *where[:-1]), strict=True)
    ]
    worst = torch.stack(off).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def bind(text: str, mesh: Mesh, sizes: Mapping[str, int]) -> Layout:
    """The layout of a spec whose dims are some of those with sizes."""
    return layout(text, mesh, where=None, **{name: sizes[name] for name in spec(text).names})


def held(x: Tensor, where: Layout) -> Tensor:
    """This rank's part of a whole tensor, no longer a part of its graph."""
    x = x.detach()
    for dim, rows in enumerate(where.indices(dist.get_rank())):
        x = x.index_select(dim, torch.from_numpy(rows))
    return x


def tour() -> list[str]:
    """Make every stop; on each rank of a running group of four."""
    lines: list[str] = []
    for stop in STOPS:
        off = visit(stop)
        if not off < TOLERANCE:
            raise AssertionError(f"{stop.name} is off by {off:.1e}")
        gradients = f"{len(stop.inputs)} gradients"
        lines.append(f"{stop.name}: the value and {gradients} equal those of one process")
    return lines


def run(rank: int, folder: str) -> None:
    """One of the ranks that this program starts itself."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    guide()


def guide() -> None:
    """Make the tour in the running group, and tell of it once."""
    lines = tour()
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


def main() -> None:
    """Run in the group that torchrun describes, or start four ranks."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        guide()
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder,), nprocs=RANKS)


if __name__ == "__main__":
    main()
