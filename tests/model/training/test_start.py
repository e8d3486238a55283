"""What a run says before its first step."""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from model.modules.qwen3_vl_moe import Qwen3VLMoe
from model.training import overview, train
from model.training.settings import Settings
from tests.tiny import tiny_config
from tests.train_folder import make_folder, options, run_train
from vlshard import load_plan
from vlshard.storage.shard_model import cut_parameters

GIVEN = {"plan": "decoder_tp", "model": "m", "data": "d", "steps": 10, "batch": 4}


def test_parameters_that_splits_cut_are_counted_whole(monkeypatch):
    monkeypatch.setattr(overview, "agree", lambda stored: [stored, stored])
    config = tiny_config()
    bound = load_plan("plans/decoder_tp.py", 2).bind(config, 2).seen_from(0)
    with torch.device("meta"):
        model = Qwen3VLMoe(config)
    whole = sum(parameter.numel() for parameter in model.parameters())
    cut_parameters(model, bound.parts)
    model.lm_head.weight.requires_grad_(False)
    # Of each of 4 layers a rank has half of q (64 x 64), k, v (32 x 64 each) and o (64 x 64).
    part, head = whole - 4 * (2 * 64 * 64 + 2 * 32 * 64) // 2, 96 * 64
    assert overview.parameter_line(bound, model) == (
        f"{whole:,} parameters, {whole - head:,} trained, {head:,} frozen; "
        f"stored per rank {part:,}, {part:,}"
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "AdamW: rate 1e-05, constant; decay 0; norm clipped to 1; seed 0"),
        (
            {"schedule": "cosine", "lr": 1e-3, "warmup": 5, "weight_decay": 0.1, "clip": 0.0},
            "AdamW: rate 0.001, cosine to 0 after 5 steps of warm-up; decay 0.1 of matrices; "
            "norm not clipped; seed 0",
        ),
    ],
)
def test_the_optimizer_is_told(changes, line):
    assert overview.optimizer_line(Settings(**GIVEN, **changes)) == line


def test_what_is_learned_of_the_first_row_is_told():
    rows = SimpleNamespace(path="d.jsonl", learned=lambda _: (20, 3, "42<|im_end|>"))
    rows = mock.MagicMock(**vars(rows), __len__=lambda _: 8)
    assert [*overview.data_lines(Settings(**GIVEN), rows, None)] == [
        "data d.jsonl: 8 rows shuffled; 10 steps of 4 rows, 5 passes",
        "  learned: what assistants say, with the end of their turns; of token rows, their labels",
        "  of the first row 3 of 20 tokens: '42<|im_end|>'",
    ]


DRY = """\
plan plans/vision_cp_ulysses.py on 2 ranks: dp=1 cp=2
  vision.patches  (img@dp.home s)@cp c; attention ulysses('cp')
  text.tokens     b@dp.home s@cp.zigzag m; attention gather('cp')
  stored replicate() (8 units), fsdp('dp cp') (7 units)
337,540 parameters, 337,540 trained, 0 frozen; stored per rank 231,716, 231,716
data rows.jsonl: 7 rows in file order; 5 steps of 3 rows, 2.14 passes
  learned: what assistants say, with the end of their turns; of token rows, their labels
  of the first row 5 of 15 tokens
computed in float32; weights, gradient sums and moments are float32
AdamW: rate 0.002, cosine to 0 after 2 steps of warm-up; decay 0.1 of all; norm clipped to 1; seed 0
run RUN writes model to out, metrics to metrics.jsonl
step 1: 43 tokens, 18 of them learned, 3 images, in 1 micro-batches
  patches per rank 28, 24
  tokens per rank, padding included, 30, 30
"""


def told(options):
    """What rank 0 says of a run, and its status."""
    said = []
    with mock.patch.object(train, "say", said.append):
        status = run_train(options)
    return status, "\n".join(said) + "\n" * bool(said), dist.get_rank()


def test_a_dry_run_says_what_would_be_done(ranks, tmp_path):
    folder = make_folder(tmp_path / "run")
    outputs = {"save": tmp_path / "out", "metrics": tmp_path / "metrics.jsonl", "dry_run": True}
    given = options(folder, plan="plans/vision_cp_ulysses.py", **outputs)
    (status, text, _), (_, silent, _) = ranks(2).run(told, given, timeout=60)
    assert (status, silent) == (0, "")
    text = re.sub(r"run [0-9a-f]{8}", "run RUN", re.sub(rf"{tmp_path}/(run/)?", "", text))
    start, deal, end = text.partition("  3 frames, 52 patches\n")
    assert start == DRY
    assert "largest share" in deal + end
    assert end.endswith("dry run: nothing was trained, nothing is written\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
