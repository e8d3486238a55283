"""Fresh parameters: transformers' distributions, seeded by name so that no plan changes them."""

from hashlib import sha256

import torch
from jaxtyping import Float32
from torch import Tensor

from model.config import Config
from model.modules.shards import Target, named_parameters, write_block
from vlshard.storage import Parts

EMBEDDING = "model.language_model.embed_tokens.weight"
DEFAULT_STD = 0.02


def initialize(
    name: str, shape: tuple[int, ...], config: Config, seed: int
) -> Float32[Tensor, "..."]:
    """A fresh parameter.

    Norms begin at one, biases at zero, all else is normal with the ``initializer_range`` of its
    tower; the row of the padding token in the embedding is zero.

    Args:
      name: Hugging Face name of the parameter.
      shape: its whole shape.
      config: of the model.
      seed: of the run; each name draws its own numbers from it.
    Returns: the whole tensor on the CPU, equal for equal arguments.
    Source: transformers 5.24, PreTrainedModel._init_weights.
    """
    module, _, kind = name.rpartition(".")
    if kind == "bias":
        return torch.zeros(shape)
    if "norm" in module.rpartition(".")[-1]:
        return torch.ones(shape)
    digest = sha256(f"{seed} {name}".encode()).digest()
    draw = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    values = torch.randn(shape, generator=draw) * _std(name, config)
    if name == EMBEDDING and config.text.pad_token_id is not None:
        values[config.text.pad_token_id] = 0
    return values


def fill(target: Target, config: Config, seed: int, parts: Parts | None = None) -> None:
    """Initialise all parameters of a model, sharded or not.

    Args:
      target: a module whose parameters have Hugging Face names, or (name, tensor) pairs; a
        DTensor is filled with its part of the whole. Nothing is sent.
      config: of the model.
      seed: of the run; the same on every rank.
      parts: the parameters of which this rank computes with a part.
    Raises: ValueError if a parameter has neither its whole shape nor that of its part.
    """
    parts = parts or Parts()
    shapes = config.parameter_shapes()
    for name, parameter in named_parameters(target).items():
        shape = parts.whole_shape(name, tuple(parameter.shape))
        wanted = parts.shape(name, shapes.get(name, shape))
        if tuple(parameter.shape) != wanted:
            found = f"{name} is {list(parameter.shape)}, expected {list(wanted)}"
            raise ValueError(f"{found}: shard_model and fill take the plan's parts alike")
        whole = initialize(name, shape, config, seed)
        write_block(name, parameter, whole.__getitem__, parts)


def _std(name: str, config: Config) -> float:
    """Standard deviation of a parameter; a range of 0 counts as unset where transformers has it."""
    vision, text, outer = config.vision, config.text, config.raw
    if name.startswith("model.visual."):
        return vision.initializer_range or DEFAULT_STD
    if name == "lm_head.weight" and "initializer_range" in outer:
        return float(outer["initializer_range"] or DEFAULT_STD)
    if name == "lm_head.weight" or ".mlp.experts." in name or ".mlp.gate." in name:
        return text.initializer_range
    return text.initializer_range or DEFAULT_STD
