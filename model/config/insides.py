"""What the model computes on dims of its own, and which parameters have these dims.

Source of the shapes: transformers 5.24, Qwen3VLMoeForConditionalGeneration.state_dict().
"""

from model.config.sections import TextConfig, VisionConfig
from vlshard import Inside

DECODER, VISION = "model.language_model", "model.visual.blocks"
TEXT = f"{DECODER}.layers"
HEADS, WIDTH = {"h": "heads", "kv": "heads"}, {"d": "the width of a head"}


def text_attention(text: TextConfig) -> Inside:
    """Attention of the decoder: query heads and key heads, cut each for itself."""
    biased = text.attention_bias
    dims = {"q": "(h d)", "k": "(kv d)", "v": "(kv d)"}
    parameters = {
        f"{TEXT}.{layer}.self_attn.{name}": spec
        for layer in range(text.num_hidden_layers)
        for name, spec in (
            *((f"{key}_proj.weight", f"{rows} m") for key, rows in dims.items()),
            *((f"{key}_proj.bias", rows) for key, rows in dims.items() if biased),
            ("o_proj.weight", "m (h d)"),
        )
    }
    sizes = {
        "h": text.num_attention_heads,
        "kv": text.num_key_value_heads,
        "d": text.head_dim,
        "m": text.hidden_size,
    }
    return Inside("text", {"text.q": "h d", "text.k": "kv d"}, sizes, parameters, HEADS, WIDTH)


def text_mlp(text: TextConfig) -> Inside:
    """The gated MLP of the decoder's dense layers."""
    dims = {"gate_proj": "f m", "up_proj": "f m", "down_proj": "m f"}
    parameters = {
        f"{TEXT}.{layer}.mlp.{name}.weight": spec
        for layer in range(text.num_hidden_layers)
        if not text.is_sparse(layer)
        for name, spec in dims.items()
    }
    sizes = {"f": text.intermediate_size, "m": text.hidden_size}
    return Inside("text", {"text.mlp": "f"}, sizes, parameters)


def text_experts(text: TextConfig) -> Inside:
    """The experts of the decoder's sparse layers, and the width of each; routers are whole."""
    parameters = {
        f"{TEXT}.{layer}.mlp.experts.{name}": spec
        for layer in range(text.num_hidden_layers)
        if text.is_sparse(layer)
        for name, spec in (("gate_up_proj", "e (2 f) m"), ("down_proj", "e m f"))
    }
    sizes = {"e": text.num_experts, "f": text.moe_intermediate_size, "m": text.hidden_size}
    dealt = {"e": "experts", "f": "columns of an expert"}
    return Inside("text", {"text.experts": "e f"}, sizes, parameters, dealt, by_index=True)


def text_vocab(text: TextConfig, *, tied: bool) -> Inside:
    """The vocabulary: the tables of the embedding and of the head, or the one that is both."""
    names = [f"{DECODER}.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]
    sizes = {"vocab": text.vocab_size, "m": text.hidden_size}
    parameters = dict.fromkeys(names, "vocab m")
    return Inside("text", {"text.vocab": "vocab"}, sizes, parameters, by_index=True)


def vision_attention(vision: VisionConfig) -> Inside:
    """Attention of the vision tower; queries, keys and values have the same heads."""
    parameters = {
        f"{VISION}.{block}.attn.{name}": spec
        for block in range(vision.depth)
        for name, spec in (
            ("qkv.weight", "(3 h d) c"),
            ("qkv.bias", "(3 h d)"),
            ("proj.weight", "c (h d)"),
        )
    }
    sizes = {"h": vision.num_heads, "d": vision.head_dim, "c": vision.hidden_size}
    return Inside("vision", {"vision.q": "h d"}, sizes, parameters, HEADS, WIDTH)


def vision_mlp(vision: VisionConfig) -> Inside:
    """The MLP of the vision tower's blocks."""
    parameters = {
        f"{VISION}.{block}.mlp.{name}": spec
        for block in range(vision.depth)
        for name, spec in (
            ("linear_fc1.weight", "f c"),
            ("linear_fc1.bias", "f"),
            ("linear_fc2.weight", "c f"),
        )
    }
    sizes = {"f": vision.intermediate_size, "c": vision.hidden_size}
    return Inside("vision", {"vision.mlp": "f"}, sizes, parameters)
