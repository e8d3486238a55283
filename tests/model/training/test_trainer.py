import pytest
import torch
from torch import nn

from model.modules.qwen3_vl_moe import Qwen3VLMoe
from model.training.trainer import decay_groups
from tests.tiny import tiny_config


def named_groups(decay):
    """Names of the parameters that decay, and of those that do not."""
    with torch.device("meta"):
        model = Qwen3VLMoe(tiny_config())
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {0.5: set(), 0.0: set()}
    for group in decay_groups(list(model.parameters()), 0.5, decay):
        found[group["weight_decay"]] |= {names[parameter] for parameter in group["params"]}
    assert found[0.5] | found[0.0] == set(names.values())
    return found[0.5], found[0.0]


def test_decay_of_all_spares_nothing():
    assert named_groups("all")[1] == set()


def test_decay_of_matrices_spares_norms_and_biases():
    decayed, spared = named_groups("matrices")
    assert all(name.endswith("bias") or "norm" in name for name in spared)
    assert not any(name.endswith("bias") or "norm" in name for name in decayed)
    for name in (
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.0.mlp.experts.gate_up_proj",
        "model.language_model.layers.0.mlp.gate.weight",
        "model.visual.patch_embed.proj.weight",  # a convolution
        "model.visual.pos_embed.weight",
    ):
        assert name in decayed


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_an_optimizer_decays_what_its_groups_say(decay):
    matrix, norm = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    for parameter in (matrix, norm):
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(decay_groups([matrix, norm], 0.5, decay), lr=0.1).step()
    assert matrix.tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert norm.tolist() == [pytest.approx(0.95 if decay == "all" else 1.0)] * 2


def test_groups_without_parameters_are_left_out():
    (only,) = decay_groups([nn.Parameter(torch.ones(2))], 0.5, "matrices")
    assert only["weight_decay"] == 0.0
