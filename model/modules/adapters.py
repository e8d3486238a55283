"""Adapters of the parts: modules that own parameters under their Hugging Face names.

Each forward reads the parameters, as FSDP left them there, into a tree and calls a pure function.
What FSDP wraps is called as a module, so that its hooks run.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.config import TextConfig, VisionConfig
from model.data import VisionInputs
from model.loss import Loss
from model.moe import Kept, Load
from model.params import (
    AttentionParams,
    EmbedParams,
    LinearParams,
    MergerParams,
    MlpParams,
    MoeParams,
    NormParams,
    TextBlockParams,
    VisionBlockParams,
)
from model.rope import Rope, vision_rope
from model.text import embed_tokens, text_block
from model.vision import embed_patches, merge_patches, merge_units, vision_block
from vlshard import Boundaries

R = TypeVar("R")


class Node(nn.Module):
    """Parameters (given by shape) and children under their names; nothing to call."""

    def __init__(self, **parts: tuple[int, ...] | nn.Module | None) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                weight = None if part is None else nn.Parameter(torch.empty(part))
                self.register_parameter(name, weight)


def _linear(out: int, inp: int, *, bias: bool) -> Node:
    return Node(weight=(out, inp), bias=(out,) if bias else None)


def _norm(width: int) -> Node:
    return Node(weight=(width,), bias=(width,))


def _linear_params(node: nn.Module) -> LinearParams:
    return LinearParams(node.weight, node.bias)


def _norm_params(node: nn.Module) -> NormParams:
    return NormParams(node.weight, node.bias)


class VisionBlock(nn.Module):
    """Adapter of ``vision_block``."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        c, f = config.hidden_size, config.intermediate_size
        self.width = config.head_dim
        self.norm1 = _norm(c)
        self.norm2 = _norm(c)
        self.attn = Node(qkv=_linear(3 * c, c, bias=True), proj=_linear(c, c, bias=True))
        self.mlp = Node(linear_fc1=_linear(f, c, bias=True), linear_fc2=_linear(c, f, bias=True))

    def _params(self) -> VisionBlockParams:
        qkv = self.attn.qkv
        parts = zip(qkv.weight.chunk(3), qkv.bias.chunk(3), strict=True)
        return VisionBlockParams(
            norm1=_norm_params(self.norm1),
            attn=AttentionParams(
                *(LinearParams(w, b) for w, b in parts), out=_linear_params(self.attn.proj)
            ),
            norm2=_norm_params(self.norm2),
            fc1=_linear_params(self.mlp.linear_fc1),
            fc2=_linear_params(self.mlp.linear_fc2),
        )

    def forward(
        self, x: Float[Tensor, "n c"], rope: Rope, at: Boundaries, recompute: bool = False
    ) -> Float[Tensor, "n c"]:
        """One block; with ``recompute``, only its input is kept for backward."""
        return _maybe_recompute(self._compute, recompute, x, rope, at)

    def _compute(self, x: Tensor, rope: Rope, at: Boundaries) -> Tensor:
        return vision_block(self._params(), x, rope, width=self.width, at=at)


class Merger(nn.Module):
    """Adapter of ``merge_patches``, or of ``merge_units`` for a DeepStack level."""

    def __init__(self, config: VisionConfig, *, deepstack: bool) -> None:
        super().__init__()
        unit = config.hidden_size * config.unit
        self.merge = config.spatial_merge_size
        self.core = merge_units if deepstack else merge_patches
        self.norm = _norm(unit if deepstack else config.hidden_size)
        self.linear_fc1 = _linear(unit, unit, bias=True)
        self.linear_fc2 = _linear(config.out_hidden_size, unit, bias=True)

    def forward(self, x: Float[Tensor, "n c"]) -> Float[Tensor, "units m"]:
        """One visual token per merge unit."""
        params = MergerParams(
            _norm_params(self.norm),
            _linear_params(self.linear_fc1),
            _linear_params(self.linear_fc2),
        )
        return self.core(params, x, merge=self.merge)


class VisionTower(nn.Module):
    """Embeds patches, runs the blocks and merges; DeepStack levels leave on the way."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        side = config.patch_size
        kernel = (config.temporal_patch_size, side, side)
        proj = Node(
            weight=(config.hidden_size, config.in_channels, *kernel), bias=(config.hidden_size,)
        )
        self.patch_embed = Node(proj=proj)
        self.pos_embed = Node(weight=(config.num_position_embeddings, config.hidden_size))
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = Merger(config, deepstack=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(config, deepstack=True) for _ in config.deepstack_visual_indexes
        )

    def forward(
        self, inputs: VisionInputs, at: Boundaries, every: int = 0
    ) -> Float[Tensor, "units levels_m"]:
        """Merged tokens and then each DeepStack level, side by side.

        Args:
          inputs: patches of this rank.
          at: where queries, keys and values travel.
          every: recompute every so many blocks in backward; 0 keeps all activations.
        """
        proj = self.patch_embed.proj
        embed = EmbedParams(proj.weight, proj.bias, self.pos_embed.weight)
        x = embed_patches(embed, inputs.pixels, inputs.corners, inputs.corner_weights)
        rope = vision_rope(inputs.coords, width=self.config.head_dim, theta=self.config.rope_theta)
        tapped = self.config.deepstack_visual_indexes
        levels: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x, rope, at, recomputed(i, every))
            if i in tapped:
                levels.append(self.deepstack_merger_list[tapped.index(i)](x))
        return torch.cat([self.merger(x), *levels], dim=-1)


class TextBlock(nn.Module):
    """Adapter of ``text_block``."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        m, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
        self.self_attn = Node(
            q_proj=_linear(q, m, bias=bias),
            k_proj=_linear(kv, m, bias=bias),
            v_proj=_linear(kv, m, bias=bias),
            o_proj=_linear(m, q, bias=bias),
            q_norm=Node(weight=(d,)),
            k_norm=Node(weight=(d,)),
        )
        self.mlp = _experts(config) if config.is_sparse(layer) else _mlp(config)
        self.input_layernorm = Node(weight=(m,))
        self.post_attention_layernorm = Node(weight=(m,))

    def _params(self) -> TextBlockParams:
        attn = self.self_attn
        nodes = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj)
        return TextBlockParams(
            norm1_w=self.input_layernorm.weight,
            attn=AttentionParams(*(_linear_params(node) for node in nodes)),
            q_norm_w=attn.q_norm.weight,
            k_norm_w=attn.k_norm.weight,
            norm2_w=self.post_attention_layernorm.weight,
            mlp=_mlp_params(self.mlp),
        )

    def forward(
        self,
        x: Float[Tensor, "b s m"],
        rope: Rope,
        real: Int[Tensor, " t"],
        at: Boundaries,
        recompute: bool = False,
    ) -> tuple[Float[Tensor, "b s m"], Load | None]:
        """One layer; with ``recompute``, its input is kept for backward, and where tokens went."""
        return _maybe_recompute(self._compute, recompute, x, rope, real, at, Kept())

    def _compute(
        self, x: Tensor, rope: Rope, real: Tensor, at: Boundaries, kept: Kept
    ) -> tuple[Tensor, Load | None]:
        eps, top_k = self.config.rms_norm_eps, self.config.num_experts_per_tok
        params = self._params()
        return text_block(params, x, rope, real, eps=eps, top_k=top_k, at=at, kept=kept)


class Embedding(nn.Module):
    """Adapter of ``embed_tokens``."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.padding_id = config.pad_token_id
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, ids: Int[Tensor, "b s"], at: Boundaries) -> Float[Tensor, "b s m"]:
        """One row per token."""
        return embed_tokens(self.weight, ids, padding_id=self.padding_id, at=at)


class Head(nn.Module):
    """Adapter of a loss, for a head of its own."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(
        self,
        rows: Float[Tensor, "z m"],
        targets: Int[Tensor, " z"],
        num_labels: Float[Tensor, ""],
        loss: Loss,
    ) -> Float[Tensor, ""]:
        """Loss term of the labelled rows."""
        return loss(rows, self.weight, targets, num_labels)


def _mlp(config: TextConfig) -> Node:
    m, f = config.hidden_size, config.intermediate_size
    return Node(
        gate_proj=_linear(f, m, bias=False),
        up_proj=_linear(f, m, bias=False),
        down_proj=_linear(m, f, bias=False),
    )


def _experts(config: TextConfig) -> Node:
    e, m, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
    experts = Node(gate_up_proj=(e, 2 * f, m), down_proj=(e, m, f))
    return Node(experts=experts, gate=_linear(e, m, bias=False))


def _mlp_params(node: nn.Module) -> MlpParams | MoeParams:
    if hasattr(node, "experts"):
        experts = node.experts
        return MoeParams(node.gate.weight, experts.down_proj, experts.gate_up_proj)
    return MlpParams(node.gate_proj.weight, node.up_proj.weight, node.down_proj.weight)


def recomputed(block: int, every: int) -> bool:
    """Whether a block is recomputed: each ``every``-th one is, none if 0."""
    return every > 0 and (block + 1) % every == 0


def _maybe_recompute(compute: Callable[..., R], recompute: bool, *args: Any) -> R:
    """Call, keeping for backward either all activations or only the arguments.

    A recompute runs to its end, so that whatever it starts it also waits for.
    """
    if not recompute:
        return compute(*args)
    return checkpoint(
        compute, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False
    )
