"""Shapes of the parameters under their Hugging Face names.

Source: transformers 5.24, Qwen3VLMoeForConditionalGeneration.state_dict().
"""

from collections.abc import Mapping

from model.config.sections import TextConfig, VisionConfig

Shape = tuple[int, ...]


def prefixed(prefix: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The same shapes, one module further down."""
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _affine(name: str, shape: Shape, *, bias: bool = True) -> dict[str, Shape]:
    """Weight, and bias along its first dim."""
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def _merger_shapes(vision: VisionConfig, norm_width: int) -> dict[str, Shape]:
    width = vision.hidden_size * vision.unit
    return (
        _affine("norm", (norm_width,))
        | _affine("linear_fc1", (width, width))
        | _affine("linear_fc2", (vision.out_hidden_size, width))
    )


def vision_shapes(vision: VisionConfig) -> dict[str, Shape]:
    """Parameters of the vision tower, below its module."""
    width, inner, side = vision.hidden_size, vision.intermediate_size, vision.patch_size
    patch = (width, vision.in_channels, vision.temporal_patch_size, side, side)
    block = (
        _affine("norm1", (width,))
        | _affine("norm2", (width,))
        | _affine("attn.qkv", (3 * width, width))
        | _affine("attn.proj", (width, width))
        | _affine("mlp.linear_fc1", (inner, width))
        | _affine("mlp.linear_fc2", (width, inner))
    )
    shapes = _affine("patch_embed.proj", patch)
    shapes["pos_embed.weight"] = (vision.num_position_embeddings, width)
    for i in range(vision.depth):
        shapes |= prefixed(f"blocks.{i}", block)
    shapes |= prefixed("merger", _merger_shapes(vision, width))
    for i in range(len(vision.deepstack_visual_indexes)):
        level = _merger_shapes(vision, width * vision.unit)
        shapes |= prefixed(f"deepstack_merger_list.{i}", level)
    return shapes


def layer_shapes(text: TextConfig, *, sparse: bool) -> dict[str, Shape]:
    """Parameters of one decoder layer, with experts or dense, below its module."""
    width, head, experts = text.hidden_size, text.head_dim, text.num_experts
    queries, keys = text.num_attention_heads * head, text.num_key_value_heads * head
    shapes: dict[str, Shape] = {}
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes |= _affine(f"self_attn.{name}_proj", (rows, width), bias=text.attention_bias)
    shapes |= _affine("self_attn.o_proj", (width, queries), bias=text.attention_bias)
    shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if sparse:
        inner = text.moe_intermediate_size
        shapes["mlp.experts.gate_up_proj"] = (experts, 2 * inner, width)
        shapes["mlp.experts.down_proj"] = (experts, width, inner)
        shapes["mlp.gate.weight"] = (experts, width)
    else:
        inner = text.intermediate_size
        shapes["mlp.gate_proj.weight"] = (inner, width)
        shapes["mlp.up_proj.weight"] = (inner, width)
        shapes["mlp.down_proj.weight"] = (width, inner)
    return shapes | {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
