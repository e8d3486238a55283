"""What the plan layer asks of a model: its boundaries, heads, parameters and units."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from vlshard.attention import Heads

# The boundaries whose layout a plan writes down; the layouts of all others follow from these and
# from the attention modes. The inside whose inner dim is the ids of tokens, which labels are too.
PATCHES = "vision.patches"
TOKENS = "text.tokens"
VOCABULARY = "text.vocab"
SITES = {"vision": PATCHES, "text": TOKENS}


@runtime_checkable
class EncoderCosts(Protocol):
    """What laying out patches must know of a model."""

    @property
    def heads(self) -> Mapping[str, Heads]:
        """Heads of each attention site."""
        ...

    @property
    def unit(self) -> int:
        """Patches of a merge unit, which no cut divides."""
        ...

    @property
    def patch_cost(self) -> tuple[float, float]:
        """(a, b): the vision encoder's work on a frame of n patches is ``a * n**2 + b * n``."""
        ...


@runtime_checkable
class ModelConfig(EncoderCosts, Protocol):
    """What a plan must know of a model to be checked against it."""

    @property
    def boundaries(self) -> Mapping[str, str]:
        """Dims of each named boundary, for example ``{"text.tokens": "b s m"}``."""
        ...

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter by name."""
        ...

    def units(self) -> tuple[str, ...]:
        """Module paths whose parameters are gathered together, children before parents.

        The last one before the root, ``""``, is the one that a forward pass uses last.
        """
        ...

    def lookups(self) -> tuple[str, ...]:
        """The units that only look rows up, so that their backward needs no parameters."""
        ...
