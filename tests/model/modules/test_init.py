"""Fresh parameters against transformers', and equal under every way to store them."""

import copy
import math

import pytest
import torch
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from model.config.config import Config
from model.modules.init import fill, initialize
from tests.tables import CONFIG, RAW


def ranged(text, vision, **outer):
    """The small config with these ranges."""
    raw = copy.deepcopy(RAW) | outer
    raw["text_config"]["initializer_range"] = text
    raw["vision_config"]["initializer_range"] = vision
    return raw


def kind_of(name):
    """The name without layer numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def moments(parameters):
    """Number, mean and deviation of all values of each kind of parameter."""
    kinds = {}
    for name, values in parameters:
        kinds.setdefault(kind_of(name), []).append(values.detach().double().flatten())
    joined = {kind: torch.cat(values) for kind, values in kinds.items()}
    return {
        kind: (len(values), values.mean().item(), values.std(correction=0).item())
        for kind, values in joined.items()
    }


@pytest.mark.parametrize(
    "raw", [ranged(0.5, 0.02), ranged(0.0, 0.0), ranged(0.02, 0.1, initializer_range=0.3)]
)
def test_distributions_are_those_of_transformers(raw):
    raw["text_config"]["mlp_only_layers"] = [1]
    raw["text_config"]["attention_bias"] = True
    torch.manual_seed(0)
    reference = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**copy.deepcopy(raw)))
    config = Config.from_dict(raw)
    ours = {name: initialize(name, shape, config, 3) for name, shape in config_shapes(config)}
    expected, got = moments(reference.named_parameters()), moments(ours.items())
    assert got.keys() == expected.keys()
    for kind, (count, mean, std) in expected.items():
        noise = 6 * std / math.sqrt(count)  # six standard errors of each of two samples
        assert got[kind][0] == count
        assert abs(got[kind][1] - mean) <= 2 * noise, kind
        assert abs(got[kind][2] - std) <= 2 * noise, kind


def config_shapes(config):
    return config.parameter_shapes().items()


def test_row_of_the_padding_token_is_zero():
    raw = copy.deepcopy(RAW)
    raw["text_config"]["pad_token_id"] = 7
    config, name = Config.from_dict(raw), "model.language_model.embed_tokens.weight"
    table = initialize(name, (104, 64), config, 0)
    assert not table[7].any()
    assert torch.equal(table[8], initialize(name, (104, 64), CONFIG, 0)[8])
    reference = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**copy.deepcopy(raw)))
    embedding = reference.get_input_embeddings().weight
    assert (embedding == 0).all(dim=1).nonzero().tolist() == [[7]]


def test_names_and_seeds_draw_their_own_numbers():
    first, second = (f"model.visual.blocks.{i}.attn.proj.weight" for i in (0, 1))
    draws = [initialize(first, (32, 32), CONFIG, 0), initialize(second, (32, 32), CONFIG, 0)]
    draws.append(initialize(first, (32, 32), CONFIG, 1))
    assert torch.equal(draws[0], initialize(first, (32, 32), CONFIG, 0))
    assert not any(torch.equal(a, b) for a, b in [draws[:2], draws[1:], draws[::2]])


def test_fill_writes_every_parameter_in_its_dtype():
    names = {"lm_head.weight": torch.bfloat16, "model.language_model.norm.weight": torch.float32}
    shapes = CONFIG.parameter_shapes()
    tensors = {name: torch.zeros(shapes[name], dtype=dtype) for name, dtype in names.items()}
    fill(tensors.items(), CONFIG, 5)
    whole = initialize("lm_head.weight", shapes["lm_head.weight"], CONFIG, 5)
    assert torch.equal(tensors["lm_head.weight"], whole.bfloat16())
    assert torch.equal(tensors["model.language_model.norm.weight"], torch.ones(64))
