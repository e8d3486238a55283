"""Programs never send more than DTensor's own plans, wherever DTensor can say both layouts.

DTensor's plan is its list of transforms, each one collective; what they send follows from the same
table by which programs are counted, with Shard to Shard as an all-to-all (on a CPU it gathers).
"""

from functools import lru_cache
from itertools import product

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

from vlshard.language.mesh_shape import MeshShape
from vlshard.programs.transition import transition

PLACES = [Replicate(), Shard(0), Shard(1), Partial()]
SHAPE = (48, 48)


@lru_cache
def device_mesh(shape):
    ranks = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)


def text_of(placements, axes):
    """The spec of placements."""
    dims = list("ab")
    for axis, place in zip(axes, placements, strict=True):
        if isinstance(place, Shard):
            dims[place.dim] += f"@{axis}"
    pending = [a for a, p in zip(axes, placements, strict=True) if isinstance(p, Partial)]
    return " ".join(dims + (["+", *pending] if pending else []))


def sent_by_dtensor(src, dst, shape):
    """Elements that a rank sends."""
    stride, dtype = (SHAPE[1], 1), torch.float32
    meta = TensorMeta(torch.Size(SHAPE), stride, dtype)
    mesh = device_mesh(shape)
    before, after = (DTensorSpec(mesh, side, tensor_meta=meta) for side in (src, dst))
    size = SHAPE[0] * SHAPE[1]
    for n, place in zip(shape, src, strict=True):
        size //= n if isinstance(place, Shard) else 1
    sent = 0
    for info in _gen_transform_infos_non_cached(before, after, False):
        n = shape[info.mesh_dim]
        match info.src_dst_placements:
            case (a, b) if a == b:
                pass
            case (Shard(), Replicate()):
                sent, size = sent + (n - 1) * size, size * n
            case (Shard(), Shard()):
                sent += size - size // n
            case (Partial(), Shard()):
                sent, size = sent + size - size // n, size // n
            case (Partial(), Replicate()):
                sent += 2 * (size - size // n)
            case (Replicate(), Shard()):
                size //= n
            case other:
                raise AssertionError(other)
    return sent


def pairs_of(axes):
    """All pairs of layouts whose sums are pending on the left if they are on the right."""
    for src, dst in product(product(PLACES, repeat=len(axes)), repeat=2):
        if all(isinstance(a, Partial) for a, b in zip(src, dst, strict=True) if b == Partial()):
            yield src, dst


def compare(pairs, sizes):
    """How many programs send less than DTensor, and as much; none may send more."""
    found = {"less": 0, "as much": 0}
    for src, dst in pairs:
        program = transition(*(text_of(side, sizes) for side in (src, dst)), MeshShape(**sizes))
        ours = program.bytes_sent(itemsize=1, a=SHAPE[0], b=SHAPE[1]).forward
        theirs = sent_by_dtensor(src, dst, tuple(sizes.values()))
        assert ours <= theirs, f"{program}\nDTensor sends {theirs}, this {ours}"
        found["less" if ours < theirs else "as much"] += 1
    return found
