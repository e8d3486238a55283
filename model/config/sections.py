"""The two towers of the model in frozen numbers, read from their sections of config.json."""

from dataclasses import dataclass
from math import isqrt

from model.config.files import quoted
from model.config.json_settings import Settings

MODEL_TYPE = "qwen3_vl_moe"
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower: sizes in patches, heads and widths."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    hidden_act: str
    rope_theta: float
    initializer_range: float

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def unit(self) -> int:
        """Patches that are merged into one visual token."""
        return self.spatial_merge_size**2

    @property
    def patch_width(self) -> int:
        """Values of one patch, as the image processor gives them."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def position_side(self) -> int:
        """Side of the square table of learned positions."""
        return isqrt(self.num_position_embeddings)


@dataclass(frozen=True)
class TextConfig:
    """The decoder: layers, heads, experts and widths."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    attention_bias: bool
    mlp_only_layers: tuple[int, ...]
    decoder_sparse_step: int
    initializer_range: float
    pad_token_id: int | None
    hidden_act: str
    router_aux_loss_coef: float

    def is_sparse(self, layer: int) -> bool:
        """Whether a decoder layer has experts (otherwise one dense network)."""
        due = (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and due and layer not in self.mlp_only_layers


def _read_rope(values: Settings, theta: float, *types: str) -> tuple[float, Settings]:
    """Base of the rotary frequencies and the section that tells of them, in either spelling."""
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.section(key)
    both = values.get("rope_scaling"), values.get("rope_parameters")
    if all(both) and both[0] != both[1]:
        values.problem("rope_scaling and rope_parameters differ: expected one of them")
    rope.one_of("rope_type" if rope.get("rope_type") is not None else "type", *types)
    for place in (values, rope):
        place.one_of("partial_rotary_factor", 1, 1.0)
    return rope.positive("rope_theta", values.positive("rope_theta", theta)), rope


def read_vision(values: Settings) -> VisionConfig:
    """The section ``vision_config``; what is absent is as in transformers 5.24."""
    values.one_of("model_type", "qwen3_vl_moe_vision", MODEL_TYPE)
    rope_theta, _ = _read_rope(values, 10_000.0, "axial", "default")
    return VisionConfig(
        depth=values.integer("depth", 27, most=MOST_LAYERS),
        hidden_size=values.integer("hidden_size", 1152),
        intermediate_size=values.integer("intermediate_size", 4304),
        num_heads=values.integer("num_heads", 16),
        in_channels=values.integer("in_channels", 3),
        patch_size=values.integer("patch_size", 16),
        temporal_patch_size=values.integer("temporal_patch_size", 2),
        spatial_merge_size=values.integer("spatial_merge_size", 2),
        out_hidden_size=values.integer("out_hidden_size", 3584),
        num_position_embeddings=values.integer("num_position_embeddings", 2304),
        deepstack_visual_indexes=values.integers("deepstack_visual_indexes", (8, 16, 24)),
        hidden_act=values.one_of("hidden_act", "gelu_pytorch_tanh"),
        rope_theta=rope_theta,
        initializer_range=values.number("initializer_range", 0.02),
    )


def read_text(values: Settings) -> TextConfig:
    """The section ``text_config``; what is absent is as in transformers 5.24."""
    _refuse_text_settings(values)
    rope_theta, rope = _read_rope(values, 500_000.0, "default")
    rope.one_of("mrope_interleaved", True)
    hidden, heads = values.integer("hidden_size", 2048), values.integer("num_attention_heads", 16)
    kv_heads = heads if values.is_null("num_key_value_heads") else 16
    experts = "num_local_experts" if values.get("num_local_experts") is not None else "num_experts"
    pad = values.get("pad_token_id")
    return TextConfig(
        vocab_size=values.integer("vocab_size", 151936),
        hidden_size=hidden,
        intermediate_size=values.integer("intermediate_size", 5632),
        num_hidden_layers=values.integer("num_hidden_layers", 24, most=MOST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=values.integer("num_key_value_heads", kv_heads),
        head_dim=values.integer("head_dim", hidden // heads),
        num_experts=values.integer(experts, 60, least=0),
        num_experts_per_tok=values.integer("num_experts_per_tok", 4),
        moe_intermediate_size=values.integer("moe_intermediate_size", 1408),
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        mrope_section=rope.integers("mrope_section", (24, 20, 20)),
        attention_bias=values.flag("attention_bias", False),
        mlp_only_layers=values.integers("mlp_only_layers", ()),
        decoder_sparse_step=values.integer("decoder_sparse_step", 1),
        initializer_range=values.number("initializer_range", 0.02),
        pad_token_id=None if pad is None else values.integer("pad_token_id", 0, least=0),
        hidden_act=values.one_of("hidden_act", "silu"),
        router_aux_loss_coef=values.number("router_aux_loss_coef", 0.001),
    )


def _refuse_text_settings(values: Settings) -> None:
    """Settings that would change what is computed, and that this model does not follow."""
    values.one_of("model_type", "qwen3_vl_moe_text")
    values.one_of("attention_dropout", 0, 0.0)
    values.one_of("norm_topk_prob", True)
    values.one_of("use_sliding_window", False)
    if values.get("sliding_window") is not None and values.get("use_sliding_window") is not False:
        values.problem(f"sliding_window = {quoted(values.get('sliding_window'))}: expected null")
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        values.problem(f"layer_types = {quoted(kinds)}: expected 'full_attention' only")
    both = values.get("num_experts"), values.get("num_local_experts")
    if None not in both and both[0] != both[1]:
        values.problem(f"num_experts = {quoted(both[0])} but num_local_experts = {quoted(both[1])}")


def contradictions(vision: VisionConfig, text: TextConfig) -> list[str]:
    """What is wrong with sizes that are well-formed one by one: one line a fault."""
    levels, table = vision.deepstack_visual_indexes, vision.num_position_embeddings
    rules = (
        (
            vision.hidden_size % (4 * vision.num_heads) == 0,
            f"vision_config.hidden_size = {vision.hidden_size}: expected a multiple of 4 x "
            f"num_heads = {4 * vision.num_heads}",
        ),
        (
            vision.position_side**2 == table,
            f"vision_config.num_position_embeddings = {table}: expected a square number",
        ),
        (
            all(a < b for a, b in zip((-1, *levels), (*levels, vision.depth), strict=True)),
            f"vision_config.deepstack_visual_indexes = {list(levels)}: expected increasing layers "
            f"below depth = {vision.depth}",
        ),
        (
            len(levels) <= text.num_hidden_layers,
            f"vision_config.deepstack_visual_indexes = {list(levels)}: more levels than "
            f"text_config.num_hidden_layers = {text.num_hidden_layers}",
        ),
        (
            vision.out_hidden_size == text.hidden_size,
            f"vision_config.out_hidden_size = {vision.out_hidden_size}: expected "
            f"text_config.hidden_size = {text.hidden_size}",
        ),
        (
            text.num_attention_heads % text.num_key_value_heads == 0,
            f"text_config.num_attention_heads = {text.num_attention_heads}: expected a multiple of "
            f"num_key_value_heads = {text.num_key_value_heads}",
        ),
        (
            text.head_dim > 0 and text.head_dim % 2 == 0,
            f"text_config.head_dim = {text.head_dim}: expected an even number above 0",
        ),
        (
            len(text.mrope_section) == 3,
            f"mrope_section = {list(text.mrope_section)}: expected three sizes",
        ),
        (
            2 * sum(text.mrope_section) == text.head_dim,
            f"mrope_section = {list(text.mrope_section)}: expected a sum of half of "
            f"text_config.head_dim = {text.head_dim}",
        ),
        (
            not text.num_experts or text.num_experts_per_tok <= text.num_experts,
            f"text_config.num_experts_per_tok = {text.num_experts_per_tok}: more than "
            f"num_experts = {text.num_experts}",
        ),
        (
            text.pad_token_id is None or text.pad_token_id < text.vocab_size,
            f"text_config.pad_token_id = {text.pad_token_id}: not below vocab_size = "
            f"{text.vocab_size}",
        ),
    )
    return [line for holds, line in rules if not holds]
