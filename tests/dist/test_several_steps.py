"""Programs of several steps on local tensors: dtypes, strides, gradient modes, reuse, compilation."""

import warnings

import pytest
import torch
import torch.distributed as dist
from jaxtyping import config
from torch.utils.checkpoint import checkpoint

from vlshard.language.layout import layout
from vlshard.comm.mesh import Mesh
from vlshard.comm.reshard import reshard

MESH = {"dp": 2, "cp": 2}
# Each of two steps or more; the left is cut evenly or whole.
ARROWS = [
    "a@dp b@cp c -> a b@dp c@cp",
    "a@dp@cp b c -> a b c@dp",
    "a@(dp cp) b c -> a b@cp c@dp",
    "a@dp b@cp c -> a b c",
    "a b@cp c + dp -> a b c",
    "a@cp b c + dp -> a@dp b c@cp",
    "a@dp.zigzag b c -> a b@(cp dp) c",
    "a b c + dp cp -> a@dp b@cp c",
]
SHAPE = (8, 4, 4)
# Dynamo looks at whatever the wrappers of the shape hook are called with.
DYNAMO_LOOKS = "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.*"


def block_of(x, side, mesh):
    """This rank's part of a whole tensor, cut dim by dim."""
    sizes = dict(zip("abc", x.shape, strict=True))
    for dim, rows in enumerate(layout(side, mesh, **sizes).indices(mesh.rank)):
        x = x.index_select(dim, torch.from_numpy(rows))
    return x


def whole_of(shape, dtype, seed):
    """Small integers, all distinct enough, exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def moved(arrow, shape, dtype, mesh):
    """What goes in, what comes out, and what should."""
    src, dst = arrow.split("->")
    sums = 1
    for axis in src.partition("+")[2].split():
        sums *= mesh.sizes[axis]
    whole = whole_of(shape, dtype, 3)
    sizes = dict(zip("abc", shape, strict=True))
    x = block_of(whole, src, mesh)
    return x, reshard(x, arrow, mesh, **sizes), block_of(whole * sums, dst, mesh)


def any_dtype(dtype, shape):
    mesh = Mesh(**MESH)
    for arrow in ARROWS:
        _, y, right = moved(arrow, shape, dtype, mesh)
        assert y.dtype == dtype and torch.equal(y, right), arrow
        with torch.no_grad():
            x = block_of(whole_of(shape, torch.float32, 3), arrow.split("->")[0], mesh)
            y = reshard(x.requires_grad_(), arrow, mesh, **dict(zip("abc", shape, strict=True)))
            assert not y.requires_grad, arrow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_any_dtype(ranks, dtype):
    ranks(4).run(any_dtype, dtype, SHAPE, timeout=120)


@pytest.mark.parametrize("shape", [(0, 4, 4), (8, 0, 4), (5, 3, 1), (1, 1, 1)], ids=str)
def test_uneven_and_empty_dims(ranks, shape):
    ranks(4).run(any_dtype, torch.float32, shape, timeout=120)


def gradients(arrow, way, mesh):
    """Gradients of a sum over everything, of a tensor with other strides, used twice."""
    x = block_of(whole_of(SHAPE, torch.float64, 3), arrow.split("->")[0], mesh)
    x = x.movedim(0, -1).contiguous().movedim(-1, 0).requires_grad_()

    def block(x):
        y = reshard(x * x, arrow, mesh)
        return y.sin() * reshard(x, arrow, mesh)

    y = way(block, x)
    y.backward((torch.arange(y.numel(), dtype=y.dtype) + mesh.rank).cos().view_as(y))
    return y.detach(), x.grad


def plainly(block, x):
    return block(x)


def recomputed(block, x):
    return checkpoint(block, x, use_reentrant=False, early_stop=False)


def compiled(block, x):
    return torch.compile(block, backend="aot_eager", fullgraph=False)(x)


def same_gradients(names):
    mesh = Mesh(**MESH)
    ways = {"recomputed": recomputed, "compiled": compiled}
    config.update("jaxtyping_disable", True)  # Dynamo cannot trace the checks
    try:
        for arrow in ARROWS:
            right = gradients(arrow, plainly, mesh)
            for name in names:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", DYNAMO_LOOKS)
                    found = gradients(arrow, ways[name], mesh)
                for a, b in zip(found, right, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    finally:
        config.update("jaxtyping_disable", False)
        torch._dynamo.reset()
    dist.barrier()


def test_recomputed_and_used_twice(ranks):
    ranks(4).run(same_gradients, ["recomputed"], timeout=120)


def test_compiled_with_graph_breaks(ranks):
    ranks(4).run(same_gradients, ["compiled"], timeout=280)
