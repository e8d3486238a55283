"""What a run says before its first step."""

from types import SimpleNamespace

import torch

from model.modules.qwen3_vl_moe import Qwen3VLMoe
from model.training import train
from tests.tiny import tiny_config
from vlshard import load_plan
from vlshard.storage.shard_model import cut_parameters


def test_parameters_that_splits_cut_are_counted_whole(monkeypatch):
    said = []
    monkeypatch.setattr(train, "tell", said.append)
    monkeypatch.setattr(train, "agree", lambda stored: [stored, stored])
    config = tiny_config()
    bound = load_plan("plans/decoder_tp.py", 2).bind(config, 2).seen_from(0)
    with torch.device("meta"):
        model = Qwen3VLMoe(config)
    whole = sum(parameter.numel() for parameter in model.parameters())
    cut_parameters(model, bound.parts)
    train.tell_start(model, bound, SimpleNamespace(plan="decoder_tp", pack=False))
    # Of each of 4 layers a rank has half of q (64 x 64), k, v (32 x 64 each) and o (64 x 64).
    part = whole - 4 * (2 * 64 * 64 + 2 * 32 * 64) // 2
    assert said == [f"plan decoder_tp: {whole:,} parameters, stored per rank {part:,}, {part:,}"]
