"""Evaluation on other rows: what transformers finds, under every plan, with ranks left empty."""

import json
import signal
from functools import cache, partial

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoImageProcessor, Qwen3VLMoeForConditionalGeneration

from model.config.config import load_config
from model.data.sample import IGNORED
from model.training.evaluation import OnePass, Scores
from model.training.interruption import Interruption
from model.training.settings import Settings
from model.training.train import train
from tests.hf_oracle import hf_outcome
from tests.tiny import make_batch, sample
from tests.train_folder import CPU, make_folder, options, read_lines, run_train, write_rows
from vlshard import local_boundaries

SIZES = [[], [(16, 24)], [(8, 8), (24, 16)], [], [(16, 16)], [], []]  # of images, by row
BATCH = 3  # the last batch has one row: fewer than ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = make_folder(tmp_path_factory.mktemp("evaluate"))
    (path / "other").mkdir()
    write_rows(path / "other", SIZES, seed=5)
    return path


@cache
def reference(folder):
    """Loss and accuracy over all labelled tokens, row by row through transformers' model."""
    from PIL import Image

    config = load_config(folder / "model")
    processor = AutoImageProcessor.from_pretrained(folder / "model")
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder / "model").train()
    total = right = count = 0
    for line in (folder / "other" / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        opened = [Image.open(folder / "other" / name) for name in row["images"]]
        found = [processor(images=[picture], return_tensors="pt") for picture in opened]
        grids = [tuple(one["image_grid_thw"][0].tolist()) for one in found]
        batch = make_batch(config, sample(row["input_ids"], *grids, labels=row["labels"]))
        batch.pixels.update({(0, i): one["pixel_values"] for i, one in enumerate(found)})
        wanted = torch.tensor([label for label in row["labels"][1:] if label != IGNORED])
        logits = hf_outcome(model, batch).logits
        total += F.cross_entropy(logits, wanted, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
        count += len(wanted)
    return total / count, right / count, count


def chosen(folder, tmp_path, plan, **changes):
    files = {"eval": folder / "other" / "rows.jsonl", "metrics": tmp_path / "metrics.jsonl"}
    still = {"lr": 0.0, "schedule": "constant", "warmup": 0, "batch": BATCH}  # no weight moves
    return options(folder, plan=f"plans/{plan}.py") | files | still | changes


CASES = [
    ("baseline_dp", 4, {}),
    ("vision_cp_ring", 4, {"pack": True}),
    ("decoder_tp", 2, {"micro_batch": 1}),
    ("decoder_vocab", 2, {"micro_batch": 2}),
]


@pytest.mark.parametrize(("plan", "world", "changes"), CASES)
def test_evaluation_finds_what_transformers_finds(ranks, folder, tmp_path, plan, world, changes):
    given = chosen(folder, tmp_path, plan, steps=1, **changes)
    assert ranks(world).run(run_train, given, timeout=180) == [0] * world
    (found,) = read_lines(tmp_path / "metrics.jsonl", "eval_loss")
    loss, accuracy, count = reference(folder)
    assert found["eval_loss"] == pytest.approx(loss, abs=1e-5)  # fp32 sums in another order
    assert found["eval_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert (found["step"], found["eval_labels"], found["eval_rows"]) == (1, count, len(SIZES))
    assert found["best"] and found["eval_seconds"] > 0


def test_evaluations_come_between_steps_and_after_the_last(ranks, folder, tmp_path):
    changes = {"steps": 0, "epochs": 2, "eval_every": 2, "lr": 3e-3, "plot": tmp_path / "a.png"}
    given = chosen(folder, tmp_path, "vision_cp_ulysses", **changes)
    assert ranks(2).run(run_train, given, timeout=180) == [0, 0]
    _, *lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [(line["step"], "eval_loss" in line) for line in map(json.loads, lines)]
    assert steps == [  # two passes over 7 rows, 3 a step, are 5 steps
        (1, False), (2, False), (2, True), (3, False), (4, False), (4, True), (5, False), (5, True),
    ]  # fmt: skip
    found = read_lines(tmp_path / "metrics.jsonl", "eval_loss")
    losses = [line["eval_loss"] for line in found]
    lowest = [min(losses[: i + 1]) == loss for i, loss in enumerate(losses)]
    assert [line["best"] for line in found] == lowest
    assert (tmp_path / "a.png").stat().st_size > 1000
    without = given | {"eval": None, "eval_every": None, "metrics": tmp_path / "without.jsonl"}
    assert ranks(2).run(run_train, without | {"plot": None}, timeout=180) == [0, 0]
    with_and_without = [
        [line["loss"] for line in read_lines(path, "loss")]
        for path in (given["metrics"], without["metrics"])
    ]
    assert with_and_without[0] == with_and_without[1]  # evaluating changes no step


def test_rows_without_labels_are_no_evaluation(ranks, folder, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [IGNORED] * 3}) + "\n")
    given = chosen(folder, tmp_path, "baseline_dp", steps=1, eval=data)
    one, other = ranks(2).run(run_train, given, timeout=180)
    assert one == other == f"--eval {data} has no labelled token"


def stopped_in_evaluation(options):
    """The status of a run whose rank 1 gets a signal while it evaluates."""
    from model.training.evaluation import Evaluator

    interruption = Interruption()
    first = Evaluator._batch

    def batch(evaluator, batch, number):
        if batch.step == 2 and torch.distributed.get_rank() == 1:
            interruption.note(signal.SIGTERM)
        return first(evaluator, batch, interruption.signal)

    Evaluator._batch = batch
    try:
        return train(Settings(**options), CPU, interruption)
    finally:
        Evaluator._batch = first


def test_a_signal_breaks_an_evaluation_off(ranks, folder, tmp_path):
    given = chosen(folder, tmp_path, "baseline_dp", eval_every=1)
    assert ranks(2).run(stopped_in_evaluation, given, timeout=180) == [128 + signal.SIGTERM] * 2
    assert read_lines(given["metrics"], "eval_loss") == []
    assert len(read_lines(given["metrics"], "loss")) == 1


def test_a_pass_takes_each_row_once():
    assert [OnePass(7, 3).rows(step) for step in range(3)] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert [OnePass(*sizes).steps for sizes in ((7, 3), (6, 3), (1, 3))] == [3, 2, 1]


def test_scores_are_summed_over_calls():
    scores = partial(Scores(CPU), at=local_boundaries())
    head = torch.eye(3, 4).T  # the logit of class k is feature k, and 0 of the last class
    hidden = torch.tensor([[2.0, 1, 0], [0, 1, 2], [-1, -2, -3]])
    first = scores(hidden, head, torch.tensor([0, 1, 3]), torch.tensor(4.0))
    rows = [[2.0, 1, 0, 0], [0, 1, 2, 0], [-1, -2, -3, 0]]
    losses = torch.tensor(rows).logsumexp(-1) - torch.tensor([2.0, 1, 0])
    assert first.item() == pytest.approx(losses.sum().item() / 4)
    nothing = scores(hidden[:0], head, torch.tensor([], dtype=torch.int64), torch.tensor(4.0))
    assert (nothing.item(), scores.func.right.item()) == (0.0, 0.5)  # the first and the last row
