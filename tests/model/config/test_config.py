"""The config against transformers' own: names, shapes, defaults, both spellings, and refusals."""

import copy
import dataclasses
import json
import os

import pytest
import torch
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from model.config.config import Config, ConfigError, load_config
from tests.tables import RAW


def changed(**sections):
    """RAW with keys of its sections (or of the outer one, as ``outer``) replaced."""
    raw = copy.deepcopy(RAW)
    for name, values in sections.items():
        (raw if name == "outer" else raw[f"{name}_config"]).update(values)
    return raw


@pytest.mark.parametrize(
    "raw",
    [
        RAW,
        changed(text={"mlp_only_layers": [1]}),
        changed(text={"decoder_sparse_step": 2}),
        changed(text={"num_experts": 0}),
        changed(text={"attention_bias": True}),
        changed(vision={"deepstack_visual_indexes": []}),
        changed(vision={"spatial_merge_size": 3, "temporal_patch_size": 1, "in_channels": 1}),
    ],
)
def test_parameters_are_those_of_transformers(raw):
    with torch.device("meta"):
        reference = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**copy.deepcopy(raw)))
    expected = [(name, tuple(x.shape)) for name, x in reference.state_dict().items()]
    assert list(Config.from_dict(raw).parameter_shapes().items()) == expected


def test_tied_head_has_no_parameter():
    raw = changed(outer={"tie_word_embeddings": True})
    with torch.device("meta"):
        reference = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**copy.deepcopy(raw)))
    expected = [(name, tuple(x.shape)) for name, x in reference.named_parameters()]
    assert list(Config.from_dict(raw).parameter_shapes().items()) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_outer_setting_ties_the_head(tied):
    raw = changed(outer={"tie_word_embeddings": tied}, text={"tie_word_embeddings": not tied})
    assert Config.from_dict(raw).tie_word_embeddings is tied


def test_absent_keys_are_as_in_transformers():
    reference = Qwen3VLMoeConfig()
    raw = {"model_type": "qwen3_vl_moe", "vision_config": {"out_hidden_size": 2048}}
    config = Config.from_dict(raw)
    text = reference.text_config.to_dict() | {
        "num_experts": reference.text_config.num_experts,
        "rope_theta": reference.text_config.rope_parameters["rope_theta"],
        "mrope_section": (24, 20, 20),
        "mlp_only_layers": (),
    }
    vision = reference.vision_config.to_dict() | {
        "rope_theta": reference.vision_config.rope_parameters["rope_theta"],
        "deepstack_visual_indexes": tuple(reference.vision_config.deepstack_visual_indexes),
        "out_hidden_size": 2048,
    }
    assert dataclasses.asdict(config.text) == {k: text[k] for k in dataclasses.asdict(config.text)}
    assert dataclasses.asdict(config.vision) == {
        k: vision[k] for k in dataclasses.asdict(config.vision)
    }
    for name in ("image", "video", "vision_start", "vision_end"):
        assert getattr(config, f"{name}_token_id") == getattr(reference, f"{name}_token_id")


def test_released_spelling_of_rope_reads_alike():
    raw = changed(
        text={
            "rope_theta": 1e6,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [4, 4, 4],
                "rope_type": "default",
            },
        },
        vision={"model_type": "qwen3_vl_moe"},
    )
    del raw["text_config"]["rope_parameters"]
    assert Config.from_dict(raw) == Config.from_dict(RAW)
    assert Config.from_dict(raw).raw == raw


def test_a_folder_of_transformers_reads_alike(tmp_path):
    Qwen3VLMoeConfig(**copy.deepcopy(RAW)).save_pretrained(tmp_path)
    assert load_config(tmp_path) == Config.from_dict(RAW)
    assert "num_local_experts" in load_config(tmp_path).raw["text_config"]


def test_config_is_frozen_and_hashable():
    config = Config.from_dict(RAW)
    assert hash(config) == hash(Config.from_dict(copy.deepcopy(RAW)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.image_token_id = 0


def test_heads_unit_and_boundaries():
    config = Config.from_dict(RAW)
    assert config.heads == {"vision": (2, 2, 16), "text": (4, 2, 24)}
    assert config.unit == 4
    assert config.boundaries["text.k"] == "b s kv d"
    assert config.boundaries["vision.patches"] == "(img s) c"


@pytest.mark.parametrize("tied", [False, True])
def test_units_hold_every_parameter_once(tied):
    config = Config.from_dict(changed(outer={"tie_word_embeddings": tied}))
    units = config.units()
    owned = {name: [] for name in units}
    for name in config.parameter_shapes():
        owner = max((unit for unit in units if name.startswith(unit)), key=len)
        owned[owner].append(name)
    assert owned["model.visual"] == [
        "model.visual.patch_embed.proj.weight",
        "model.visual.patch_embed.proj.bias",
        "model.visual.pos_embed.weight",
    ]
    embedding, norm = "model.language_model.embed_tokens.weight", "model.language_model.norm.weight"
    assert owned[""] == ([embedding, norm] if tied else [norm])
    assert all(owned.values())
    assert units.index("model.visual.deepstack_merger_list.1") < units.index("model.visual")
    assert units[-1] == ""


def test_all_unsupported_settings_are_listed_at_once():
    raw = changed(
        outer={"quantization_config": {"quant_method": "fp8"}},
        text={
            "hidden_act": "gelu",
            "sliding_window": 32,
            "attention_dropout": 0.1,
            "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
            "num_experts": "eight",
        },
        vision={"hidden_act": "relu", "patch_size": [16, 16]},
    )
    with pytest.raises(ConfigError) as error:
        Config.from_dict(raw, where="config.json")
    assert str(error.value) == (
        "config.json: this model cannot be built\n"
        "  vision_config.patch_size = [16, 16]: expected an int >= 1\n"
        "  vision_config.hidden_act = 'relu': expected 'gelu_pytorch_tanh'\n"
        "  text_config.attention_dropout = 0.1: expected 0 or 0.0\n"
        "  text_config.sliding_window = 32: expected null\n"
        "  text_config.rope_parameters.rope_type = 'yarn': expected 'default'\n"
        "  text_config.num_experts = 'eight': expected an int >= 0\n"
        "  text_config.hidden_act = 'gelu': expected 'silu'\n"
        "  quantization_config: quantised weights are not read"
    )


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (changed(vision={"out_hidden_size": 48}), "expected text_config.hidden_size = 64"),
        (changed(vision={"deepstack_visual_indexes": [2, 0]}), "expected increasing layers"),
        (changed(vision={"deepstack_visual_indexes": [3]}), "below depth = 3"),
        (changed(vision={"num_position_embeddings": 15}), "expected a square number"),
        (changed(vision={"num_heads": 3}), "expected a multiple of 4 x num_heads = 12"),
        (changed(text={"num_hidden_layers": 1}), "more levels than"),
        (changed(text={"num_key_value_heads": 3}), "a multiple of num_key_value_heads = 3"),
        (changed(text={"num_experts_per_tok": 9}), "more than num_experts = 8"),
        (changed(text={"pad_token_id": 104}), "not below vocab_size = 104"),
        (changed(text={"use_sliding_window": True}), "use_sliding_window = True"),
        (changed(text={"layer_types": ["sliding_attention"] * 4}), "'full_attention' only"),
        (changed(text={"num_local_experts": 4}), "num_experts = 8 but num_local_experts = 4"),
        (changed(text={"model_type": "qwen3_vl_text"}), "expected 'qwen3_vl_moe_text'"),
        (changed(outer={"vision_config": 3}), "vision_config = 3: expected an object"),
        (changed(text={"layer_types": 4}), "'full_attention' only"),
        (changed(text={"head_dim": 16}), "expected a sum of half of text_config.head_dim = 16"),
        (changed(text={"rms_norm_eps": float("inf")}), "rms_norm_eps = inf: expected a number"),
        (changed(text={"initializer_range": 10**400}), "expected a number >= 0"),
        (changed(text={"initializer_range": 10**9999}), "a number of thousands of digits"),
        (
            changed(outer={"image_token_id": 100, "video_token_id": 100}),
            "image_token_id = 100 is video_token_id too: expected ids of their own",
        ),
        (
            changed(outer={"vision_end_token_id": 100}),
            "image_token_id = 100 is vision_end_token_id",
        ),
        (
            changed(vision={"rope_theta": 0}),
            "vision_config.rope_theta = 0: expected a number above",
        ),
        (
            changed(text={"rope_parameters": {"rope_theta": 0.0}}),
            "text_config.rope_parameters.rope_theta = 0.0: expected a number above 0",
        ),
        (
            changed(text={"rope_scaling": {"mrope_section": [4, 4, 4], "rope_theta": 5e5}}),
            "text_config.rope_scaling and rope_parameters differ: expected one of them",
        ),
        (
            changed(text={"vocab_size": 10**9}),
            "vocab_size = 1000000000: expected at most 16,777,216",
        ),
        (changed(text={"vocab_size": 1e30}), "vocab_size = 1e+30: expected an int >= 1"),
        (changed(text={"vocab_size": 10**30}), "expected at most 16,777,216"),
        (changed(text={"num_experts": 10**9}), "num_experts = 1000000000: expected at most"),
        (changed(text={"num_hidden_layers": 10**9}), "expected at most 10,000"),
        (changed(vision={"depth": 10**9}), "vision_config.depth = 1000000000: expected at most"),
        (
            changed(text={"num_experts": 10**7, "moe_intermediate_size": 10**7}),
            "its sizes make 76,800,002,560,187,896 parameters, expected at most 100,000,000,000",
        ),
        (changed(text={"num_attention_heads": 128, "head_dim": None}), "an even number above 0"),
    ],
)
def test_what_does_not_fit_is_refused(raw, line):
    with pytest.raises(ConfigError) as error:
        Config.from_dict(raw)
    assert line in str(error.value)


def test_what_is_quoted_of_a_file_is_short():
    raw = changed(text={"hidden_act": "a" * 10**6, "layer_types": ["b" * 10**6] * 9})
    with pytest.raises(ConfigError) as error:
        Config.from_dict(raw)
    assert "hidden_act = 'aaa" in str(error.value)
    assert "layer_types = ['bbb" in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("raw", [{}, {"model_type": "qwen3_vl"}, changed(outer={"model_type": 1})])
def test_other_model_types_are_refused(raw):
    with pytest.raises(ConfigError, match="not 'qwen3_vl_moe'"):
        Config.from_dict(raw)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "no valid JSON"),
        ("[" * 100_000, "no valid JSON"),
        ("[1]", "an object"),
        ('{"image_token_id": 1, "image_token_id": 2}', "duplicate keys: image_token_id"),
        ('{"text_config": {"head_dim": 8, "head_dim": 8}}', "duplicate keys: head_dim"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message.replace("an object", "expected a JSON object")):
        load_config(tmp_path)


def test_the_file_itself_can_be_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert load_config(tmp_path / "config.json") == load_config(tmp_path)


def test_a_pipe_in_place_of_the_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path)
    path = tmp_path / "config.json"
    assert str(error.value) == f"{path}: cannot be read: found a pipe, expected a file"
