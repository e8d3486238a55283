"""Moves on an accelerator against the CPU's, in under five minutes; says so if there is none.

``python -m tests.benchmarks.on_device``: one rank over the device's own backend (NCCL), then two
ranks on one device over gloo. Each carries out an even gather, an even sum, an uneven exchange and
an all-to-all, forward and backward, in fp32 and bf16, and compares with the same on the CPU.
It has not been run on hardware yet.
"""

import sys
import time

import torch
import torch.distributed as dist

from tests.benchmarks.launch import inside_ranks, on_ranks
from vlshard import Mesh, Packing, reshard

ARROWS = ("t@cp d -> t d", "t d + cp -> t@cp d", "t@cp d -> t d@cp", "(img s)@cp d -> (img@cp s) d")


def sizes_of(arrow: str) -> dict[str, int | Packing]:
    """Global sizes of an arrow's dims."""
    if "img" in arrow:
        return {"img": Packing([12, 4, 8, 20, 4], unit=4), "d": 4}
    return {"t": 8, "d": 4}


def carried(arrow: str, mesh: Mesh, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """A result and its gradient, by one device."""
    sizes = sizes_of(arrow)
    rows = sum(sizes["img"].lengths) if isinstance(sizes.get("img"), Packing) else 8
    local = rows if "+" in arrow else rows // mesh.size
    x = (torch.arange(local * 4.0).reshape(local, 4) + 100 * mesh.rank).to(device, dtype)
    x.requires_grad_()
    y = reshard(x, arrow, mesh, **sizes)
    (grad,) = torch.autograd.grad((y * (1 + mesh.rank)).sum(), x)
    return [y.detach().cpu(), grad.cpu()]


def compare(device: str) -> int:
    """How many moves of this rank differ from the CPU's."""
    mesh, wrong = Mesh(cp=dist.get_world_size()), 0
    for arrow in ARROWS:
        for dtype in (torch.float32, torch.bfloat16):
            found, right = (carried(arrow, mesh, place, dtype) for place in (device, "cpu"))
            same = all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
            wrong += not same
            if mesh.rank == 0:
                print(f"{arrow:32}{dtype!s:16}{'equal' if same else 'DIFFERS'}", flush=True)
    return wrong


def main() -> int:
    start = time.monotonic()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        print("no accelerator here: nothing was run")
        return 0
    device = accelerator.type
    if inside_ranks():
        dist.init_process_group("gloo")
        return compare(device)
    torch.accelerator.set_device_index(0)
    store = dist.HashStore()
    backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    print(f"one rank, {backend}", flush=True)
    wrong = compare(device)
    dist.destroy_process_group()
    print(f"two ranks on one device, gloo, after {time.monotonic() - start:.0f} s", flush=True)
    print(on_ranks("tests.benchmarks.on_device", []), end="")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
