"""Which kernel attends to runs of a pack: one small function a device, and a probe for others.

Only the CPU's has been run. Those of CUDA and Ascend are chosen and called as their documentation
says, and not run on hardware yet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from jaxtyping import Float
from torch import Tensor

from vlshard.attention.runs import Runs, segmented_attention
from vlshard.comm import HALVES
from vlshard.language import PlanError

Attend = Callable[[Tensor, Tensor, Tensor, Runs], Tensor]

# What a causal call of the Ascend kernel takes for a mask: the last query sees the last key.
RIGHT_DOWN = 3
MASK_SIDE = 2048


@dataclass(frozen=True)
class Kernel:
    """Attention of runs of queries to their keys, as ``segmented_attention`` defines it.

    Attributes:
      name: for messages.
      attend: takes q [n h d], k and v [nk kv d] and the runs; gives one row per query.
      device: where it is tried before it is used.
      dtype: in what.
    """

    name: str
    attend: Attend
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


def attend_runs(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "nk kv d"],
    v: Float[Tensor, "nk kv d"],
    runs: Runs,
    kernel: Kernel | None = None,
) -> Float[Tensor, "n h d"]:
    """Attention of each run of queries to its own keys; see ``segmented_attention``.

    Args:
      q: queries; the runs are in their order.
      k: keys.
      v: values.
      runs: which keys each run of queries sees.
      kernel: what computes it; None takes the device's own.
    Returns: one row per query, in the order of q and its dtype.
    """
    chosen = kernel or device_kernel(q.device.type, q.dtype)
    if not any(runs.q_lengths):
        return segmented_attention(q, k, v, runs)
    return chosen.attend(q, k, v, runs)


def device_kernel(device: str, dtype: torch.dtype) -> Kernel:
    """The kernel of a device: packed where it has one for the dtype, else torch's own."""
    if device == "cuda" and dtype in HALVES:
        return Kernel("varlen_attn", varlen_attention)
    if device == "npu" and dtype in HALVES:
        return Kernel("npu_fusion_attention", npu_attention)
    return Kernel("scaled_dot_product_attention", segmented_attention)


def takes_all_runs(device: str, dtype: torch.dtype) -> bool:
    """Whether a device's kernel takes all runs in one call."""
    return device in ("cuda", "npu") and dtype in HALVES


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Tensor:
    """CUDA: one call for all runs; not run on hardware yet.

    Source: torch 2.13, torch.nn.attention.varlen.varlen_attn.
    """
    ends = (x.index(q.device).int() for x in (runs.q_ends, runs.k_ends))
    return import_module("torch.nn.attention.varlen").varlen_attn(
        q,
        runs.packed_keys.take(k).flatten(0, 1),
        runs.packed_keys.take(v).flatten(0, 1),
        *ends,
        max(runs.q_lengths),
        max(runs.k_lengths),
        window_size=(-1, 0) if runs.causal else (-1, -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def npu_attention(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Tensor:
    """Ascend: one call for all runs, in its packed layout; not run on hardware yet.

    Source: torch_npu, npu_fusion_attention with input_layout TND.
    """
    more: dict[str, object] = {}
    if runs.causal:
        mask = torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device=q.device).triu(1)
        more = {"atten_mask": mask, "sparse_mode": RIGHT_DOWN}
    result = import_module("torch_npu").npu_fusion_attention(
        q,
        runs.packed_keys.take(k).flatten(0, 1),
        runs.packed_keys.take(v).flatten(0, 1),
        q.shape[1],
        "TND",
        scale=q.shape[-1] ** -0.5,
        actual_seq_qlen=runs.q_ends.starts[1:].tolist(),
        actual_seq_kvlen=runs.k_ends.starts[1:].tolist(),
        **more,
    )
    return result[0]


def probe(kernel: Kernel) -> None:
    """Refuse a kernel that does not do what attention here is; called once, at start.

    Changes the last key of a segment and looks at the segment's first query and at the next
    segment; then lets that key dominate, so that its value must come out.

    Args:
      kernel: what to try, on its device and in its dtype.
    Raises: PlanError that names the kernel and what it did.
    """
    runs, draw = Runs.segments([5, 3]), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, 2, 16, generator=draw).to(kernel.device, kernel.dtype) for _ in "qkv")
    before = kernel.attend(q, k, v, runs)
    changed = v.clone()
    changed[4] += 1
    after = kernel.attend(q, k, changed, runs)
    strong = k.clone()
    strong[4] = 100 * q[0]
    top = kernel.attend(q, strong, v, runs)
    fault = None
    if before.shape != q.shape or before.dtype != q.dtype:
        fault = f"gave {before.dtype} {tuple(before.shape)} for q of {q.dtype} {tuple(q.shape)}"
    elif torch.equal(before[0], after[0]):
        fault = "the first query of a segment did not see the segment's last key"
    elif not torch.equal(before[5:], after[5:]):
        fault = "queries saw a key of another segment"
    elif not torch.allclose(top[0], v[4], atol=2e-2):
        fault = "a key that outweighs all others did not give its value"
    if fault:
        notes = [
            "fix: a kernel that attends inside segments both ways, or none for the device's own"
        ]
        raise PlanError(f"attention kernel {kernel.name!r} cannot be used: {fault}", notes=notes)
