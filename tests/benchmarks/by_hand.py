"""Tensor and sequence parallelism of transformers' decoder by torch's own classes.

As torchtitan does it for such models: heads and MLP width cut, tokens cut between blocks, table and
head cut by the vocabulary with ``loss_parallel``. The vision encoder is whole on every rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

TOKENS = Shard(1)  # of [b s m]


def split_by_hand(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the decoder of ``Qwen3VLMoeForConditionalGeneration`` over the ranks of a mesh.

    Args:
      model: on the meta device; all its decoder layers have a dense MLP.
      mesh: of one dim.
    """
    decoder: Any = model.model.language_model
    for layer in decoder.layers:
        parallelize_module(layer, mesh, _layer_plan())
    of_decoder = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "norm": SequenceParallel(use_local_output=True),
        "layers.0": PrepareModuleInput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(TOKENS,),
            use_local_output=True,
        ),
    }
    parallelize_module(decoder, mesh, of_decoder)
    head = ColwiseParallel(input_layouts=TOKENS, use_local_output=False)
    parallelize_module(model, mesh, {"lm_head": head})
    decoder._deepstack_process = _Deepstack(mesh)


def _layer_plan() -> dict[str, Any]:
    """What torch does to the modules of one decoder layer."""
    whole = Replicate()
    # A norm of whole heads: its weight is replicated, its gradient a term on each rank.
    head_norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {
        "input_layernorm": SequenceParallel(use_local_output=True),
        "post_attention_layernorm": SequenceParallel(use_local_output=True),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": TOKENS},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "self_attn.q_proj": ColwiseParallel(use_local_output=False),
        "self_attn.k_proj": ColwiseParallel(use_local_output=False),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.q_norm": head_norm,
        "self_attn.k_norm": head_norm,
        "self_attn.o_proj": RowwiseParallel(output_layouts=TOKENS),
        "mlp": PrepareModuleInput(input_layouts=(TOKENS,), desired_input_layouts=(whole,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=TOKENS),
    }


def sum_terms(parameters: list[nn.Parameter]) -> None:
    """Sum the gradients that are still terms on each rank, those of norms."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            parameter.grad = grad.redistribute(placements=parameter.placements)


class _Deepstack:
    """Adds a level of visual rows to this rank's tokens; transformers' own indexes all tokens."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._me, self._ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def __call__(self, hidden: Tensor, visual: Tensor, rows: Tensor) -> Tensor:
        own = hidden.shape[1]
        assert visual.shape[1] == own * self._ranks
        here = slice(self._me * own, (self._me + 1) * own)
        number = (visual.flatten().cumsum(0) - 1).view(visual.shape)
        mine = visual[:, here]
        hidden = hidden.clone()
        hidden[mine] += _SumGradients.apply(rows, self._group)[number[:, here][mine]]
        return hidden


class _SumGradients(torch.autograd.Function):
    """The identity, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        grad = grad_outputs[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
