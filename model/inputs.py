"""The tensors that one rank computes a micro-batch from, built on the host from ids and grids."""

from jaxtyping import Float, Int
from torch import Tensor

from vlshard.pytree import pytree


@pytree
class VisionInputs:
    """Patches of this rank, in the order of its share; n patches of p values each.

    ``corners`` and ``corner_weights`` say how the learned position table is interpolated at each
    patch: its four nearest table rows and their bilinear weights.
    """

    pixels: Float[Tensor, "n p"]
    coords: Int[Tensor, "n 2"]
    corners: Int[Tensor, "n 4"]
    corner_weights: Float[Tensor, "n 4"]


@pytree
class TextInputs:
    """Tokens of this rank: b rows of s positions, padded behind the last token.

    ``real``, ``visual`` and ``labelled`` are indices into the flat b*s rows, increasing: tokens
    that are no padding, visual placeholders, and tokens with a target. ``num_labels`` is the
    number of labelled tokens of the whole global batch, as a 0-dim float, at least 1.
    """

    ids: Int[Tensor, "b s"]
    positions: Int[Tensor, "3 b s"]
    real: Int[Tensor, " t"]
    visual: Int[Tensor, " v"]
    labelled: Int[Tensor, " y"]
    targets: Int[Tensor, " y"]
    num_labels: Float[Tensor, ""]


@pytree
class ModelInputs:
    """One rank's part of a micro-batch; ``vision`` is None where no rank has a visual row."""

    vision: VisionInputs | None
    text: TextInputs
