"""Parameters of the pure functions: frozen trees of tensors, no names of any checkpoint.

Dims: c vision width, m model width, f expert or MLP width, e experts, ch image channels.
"""

from jaxtyping import Float
from torch import Tensor

from vlshard.pytree import pytree


@pytree
class LinearParams:
    """An affine map from ``inp`` to ``out`` features; ``b`` is None where there is no bias."""

    w: Float[Tensor, "out inp"]
    b: Float[Tensor, " out"] | None


@pytree
class NormParams:
    """Scale and shift of a layer norm."""

    w: Float[Tensor, " c"]
    b: Float[Tensor, " c"]


@pytree
class EmbedParams:
    """Patch embedding, kept as the 3-D convolution it stands for, and the square position table."""

    proj_w: Float[Tensor, "c ch frames side side"]
    proj_b: Float[Tensor, " c"]
    table: Float[Tensor, "places c"]


@pytree
class AttentionParams:
    """Projections to queries, keys, values and back."""

    q: LinearParams
    k: LinearParams
    v: LinearParams
    out: LinearParams


@pytree
class VisionBlockParams:
    """One block of the vision tower."""

    norm1: NormParams
    attn: AttentionParams
    norm2: NormParams
    fc1: LinearParams
    fc2: LinearParams


@pytree
class MergerParams:
    """From merge units of patches to visual tokens; ``norm`` is as wide as a patch or a unit."""

    norm: NormParams
    fc1: LinearParams
    fc2: LinearParams


@pytree
class MlpParams:
    """A gated MLP."""

    gate_w: Float[Tensor, "f m"]
    up_w: Float[Tensor, "f m"]
    down_w: Float[Tensor, "m f"]


@pytree
class MoeParams:
    """Router, and the stacked experts that are here: of all e, or of a part of them.

    Rows ``:f`` of ``gate_up`` are the gate, the others are up.
    """

    router_w: Float[Tensor, "e m"]
    down: Float[Tensor, "here m f"]
    gate_up: Float[Tensor, "here 2*f m"]


@pytree
class TextBlockParams:
    """One decoder layer; ``q_norm`` and ``k_norm`` scale each head."""

    norm1_w: Float[Tensor, " m"]
    attn: AttentionParams
    q_norm_w: Float[Tensor, " d"]
    k_norm_w: Float[Tensor, " d"]
    norm2_w: Float[Tensor, " m"]
    mlp: MlpParams | MoeParams
