import copy
import json
import math
import os
import shutil
import signal
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.tensor import DTensor
from transformers import AutoImageProcessor, Qwen3VLMoeForConditionalGeneration

from model.config.config import load_config
from model.data.loader import Loader
from model.data.sample import IGNORED
from model.training.build import build_model
from model.training.job import prepare
from model.training.measure import kept_cost
from model.training.settings import Settings
from model.training.trainer import Trainer
from tests.hf_oracle import hf_outcome
from tests.tiny import make_batch, sample
from tests.train_folder import (
    BATCH,
    CPU,
    DECAY,
    LR,
    STEPS,
    broken_rows,
    make_folder,
    options,
    read_metrics,
    run_train,
    write_rows,
)
from vlshard.storage.norm import local_part

ROOT = Path(__file__).resolve().parents[3]
ULYSSES = "plans/vision_cp_ulysses.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with weights and the processor's settings, and rows with images."""
    return make_folder(tmp_path_factory.mktemp("train"))


def reference_rates():
    """Linear warm-up over two steps, then half a cosine to zero over the other three."""
    return [LR / 2, LR, *(LR * (1 + math.cos(math.pi * done / 3)) / 2 for done in range(3))]


@cache
def reference(folder):
    """Losses and gradient norms of transformers' model, trained by hand in one process."""
    config = load_config(folder / "model")
    processor = AutoImageProcessor.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder / "model").train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=DECAY)
    losses, norms = [], []
    for step, rate in enumerate(reference_rates()):
        samples, pixels = [], {}
        for index in range(BATCH):
            row = rows[(step * BATCH + index) % len(rows)]
            opened = [Image.open(folder / name) for name in row["images"]]
            grids = []
            for item, picture in enumerate(opened):
                found = processor(images=[picture], return_tensors="pt")
                grids.append(tuple(found["image_grid_thw"][0].tolist()))
                pixels[index, item] = found["pixel_values"]
            samples.append(sample(row["input_ids"], *grids, labels=row["labels"]))
        batch = make_batch(config, *samples)
        batch.pixels.update(pixels)
        losses.append(hf_outcome(model, batch).loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return losses, norms


@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize(
    ("plan", "world"),
    [
        ("single", 1),
        ("baseline_dp", 2),
        ("vision_dp1", 2),
        ("vision_cp_colossal", 2),
        ("vision_cp_ulysses", 2),
        ("vision_cp_ulysses", 4),
    ],
)
def test_train_follows_transformers(ranks, folder, tmp_path, plan, world, micro_batch):
    metrics = tmp_path / "metrics.jsonl"
    chosen = {"plan": f"plans/{plan}.py", "metrics": metrics, "micro_batch": micro_batch}
    statuses = ranks(world).run(run_train, options(folder, **chosen), timeout=180)
    assert statuses == [0] * world
    found = read_metrics(metrics)
    losses, norms = reference(folder)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    # fp32 sums in another order, carried through five AdamW steps
    assert [line["loss"] for line in found] == pytest.approx(losses, abs=1e-5)
    assert [line["grad_norm"] for line in found] == pytest.approx(norms, rel=2e-5)
    assert [line["lr"] for line in found] == pytest.approx(reference_rates())
    assert [line["images"] for line in found] == [3, 0, 2, 2, 2]
    assert [sum(line["vision_rows"]) for line in found] == [24 + 28, 0, 16 + 24, 28, 16 + 24]
    assert all(len(line["text_rows"]) == world and line["seconds"] > 0 for line in found)
    assert all(len(line["peak_mib"]) == world and min(line["peak_mib"]) > 50 for line in found)
    parts = [f"{part}_seconds" for part in ("data", "forward", "backward", "exchange", "update")]
    assert all(0 < sum(line[part] for part in parts) <= line["seconds"] for line in found)
    assert all(line["model_flops"] > 1e7 for line in found)


def test_packed_training_follows_transformers(ranks, folder, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    chosen = {"plan": "plans/vision_cp_colossal.py", "metrics": metrics, "pack": True}
    assert ranks(2).run(run_train, options(folder, **chosen), timeout=180) == [0, 0]
    found, (losses, norms) = read_metrics(metrics), reference(folder)
    assert [line["loss"] for line in found] == pytest.approx(losses, abs=1e-5)
    assert [line["grad_norm"] for line in found] == pytest.approx(norms, rel=2e-5)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    lengths = [len(rows[i % len(rows)]["input_ids"]) for i in range(STEPS * BATCH)]
    tokens = [sum(lengths[BATCH * step :][:BATCH]) for step in range(STEPS)]
    assert [sum(line["text_rows"]) for line in found] == tokens  # no padding


def run_train_and_tell_cost(options):
    """The exit status, and the cost by which a run like it would deal."""
    status = run_train(options | {"steps": 1})
    saved = options | {"model": options["save"], "save": None}
    return status, prepare(Settings(**saved), CPU).bound.cost


def test_a_measured_cost_is_saved_and_taken_from_the_checkpoint(ranks, folder, tmp_path):
    chosen = {"plan": "plans/vision_dp1.py", "save": tmp_path / "out", "measure_cost": True}
    found = ranks(2).run(run_train_and_tell_cost, options(folder, **chosen), timeout=180)
    kept = json.loads((tmp_path / "out" / "frame_cost.json").read_text())
    assert found == [(0, (kept["a"], kept["b"]))] * 2
    assert kept_cost(tmp_path / "out") == (kept["a"], kept["b"])
    again = options(folder, **chosen, overwrite=True) | {"model": tmp_path / "out"}
    assert ranks(2).run(run_train_and_tell_cost, again, timeout=180) == found


def truncated_image(folder, target):
    data = broken_rows(folder, target, 3)
    whole = (target / "2.1.png").read_bytes()
    (target / "2.1.png").write_bytes(whole[: len(whole) // 2])
    return data


def empty(folder, target):
    target.mkdir()
    (target / "rows.jsonl").write_text("\n")
    return target / "rows.jsonl"


FAULTS = {
    "unknown plan": ({"plan": "plans/nothing.py"}, None, "no plan file 'plans/nothing.py'"),
    "plan and world": ({"plan": "plans/single.py"}, None, "the world has 2"),
    "missing model": ({"model": Path("no/such/model")}, None, "no/such/model"),
    "missing data": ({"data": Path("no/such/rows.jsonl")}, None, "no/such/rows.jsonl: the data"),
    "empty data": ({}, empty, "the data is empty"),
    "frozen all": ({"freeze": ("*",)}, None, "--freeze leaves no parameter to train"),
    "frozen none": ({"freeze": ("model.vision.*",)}, None, "'model.vision.*' matches no parameter"),
    "broken JSON": ({}, lambda f, t: broken_rows(f, t, 3, text='{"a'), "rows.jsonl:3: broken JSON"),
    "lengths": ({}, lambda f, t: broken_rows(f, t, 3, labels=[1]), "20 input_ids and 1 labels"),
    "grid": ({}, lambda f, t: broken_rows(f, t, 3, images=["0.0.png"]), "rows.jsonl:3: row 2"),
    "no image": ({}, lambda f, t: broken_rows(f, t, 3, images=["9.png"]), "no such image file"),
    "damaged image": ({}, truncated_image, "2.1.png: cannot be decoded"),
    "target": ({"save": ROOT / "tests"}, None, "it is not replaced"),
    "metrics in a folder": ({"metrics": ROOT / "tests"}, None, "Is a directory"),
    "data as metrics": ({"metrics": "data"}, None, "--metrics and --data both name"),
    "plot of no kind": ({"plot": Path("plot.docx")}, None, "no picture that can be drawn"),
    "no number": ({"lr": 1e38, "schedule": "constant", "warmup": 0}, None, "step 1 had loss"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_train_raises_one_error_on_all_ranks(ranks, folder, tmp_path, fault):
    changes, make, text = FAULTS[fault]
    data = {"data": make(folder, tmp_path / "broken")} if make else {}
    chosen = {"plan": "plans/baseline_dp.py", "save": tmp_path / "out" / "export"} | data | changes
    if changes.get("metrics") == "data":
        chosen["metrics"] = folder / "rows.jsonl"
    outcomes = ranks(2).run(run_train, options(folder, **chosen), timeout=180)
    assert outcomes[0] == outcomes[1]
    assert text in outcomes[0]
    assert list((tmp_path / "out").glob("*")) == []


def train_one_step(options):
    """Raw gradients, weights before and after, and whether visual tokens need a gradient."""
    settings = Settings(**options)
    job = prepare(settings, torch.device("cpu"))
    model = build_model(settings, job, CPU)
    seen = []
    model.model.visual.register_forward_hook(lambda *call: seen.append(call[-1].requires_grad))
    before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    trainer = Trainer(settings, model, CPU)
    group = dist.new_group(backend="gloo")
    with Loader(job.reading, job.rows, job.images, job.config, job.bound, group) as loader:
        (batch,) = loader
        trainer.step(batch)
    after = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    dtypes = {str(x.dtype) for x in (*model.parameters(), *grads.values())}
    gradients = {name: whole(grads[name]) if name in grads else None for name in before}
    return gradients, before, after, seen, dtypes


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def is_frozen(name, case):
    if case == "decoder":
        return not name.startswith("model.visual.")
    tower = name.startswith("model.visual.")
    if case == "blocks":
        return name.startswith("model.visual.blocks.")
    if case == "all but DeepStack mergers":
        return not name.startswith("model.visual.deepstack_merger_list.")
    if case == "qkv":
        return tower and ".attn.qkv." in name
    return tower


PATTERNS = {
    "vision": ("model.visual.*",),
    "blocks": ("model.visual.blocks.*",),
    "all but DeepStack mergers": (
        "model.visual.blocks.*",
        "model.visual.merger.*",
        "model.visual.p*",
        "model.language_model.*",
        "lm_head.*",
    ),
    "decoder": ("model.language_model.*", "lm_head.weight"),
    "qkv": ("model.visual.blocks.*.attn.qkv.*",),
}


@pytest.fixture(scope="module")
def free_gradients(ranks, folder):
    """Raw gradients of one step in which nothing is frozen."""
    chosen = options(folder, plan="plans/baseline_dp.py", steps=1, clip=0.0)
    return ranks(2).run(train_one_step, chosen, timeout=180)[0][0]


def recomputing_plan(folder):
    """A plan file: data parallel, every block recomputed."""
    text = (ROOT / "plans" / "baseline_dp.py").read_text()
    extra = '        checkpoint={"vision": 1, "text": 1},\n'
    (folder / "plan.py").write_text(text.replace("    )\n", extra + "    )\n"))
    return str(folder / "plan.py")


@pytest.mark.parametrize("case", PATTERNS)
@pytest.mark.parametrize("plan", ["recomputing", "vision_cp_ulysses"])
def test_frozen_parameters_stay_and_others_train_as_before(
    ranks, folder, free_gradients, tmp_path, plan, case
):
    path = recomputing_plan(tmp_path) if plan == "recomputing" else f"plans/{plan}.py"
    chosen = options(folder, plan=path, steps=1, clip=0.0, freeze=PATTERNS[case])
    gradients, before, after, seen, _ = ranks(2).run(train_one_step, chosen, timeout=180)[0]
    assert seen == [case != "vision"]
    for name, gradient in gradients.items():
        assert (gradient is None) == is_frozen(name, case), name
        assert torch.equal(before[name], after[name]) == is_frozen(name, case), name
        if gradient is not None:
            torch.testing.assert_close(gradient, free_gradients[name], rtol=1e-4, atol=1e-6)


def test_a_step_of_text_leaves_the_vision_tower_alone(ranks, folder, tmp_path):
    write_rows(tmp_path, [[], [], []])
    chosen = options(folder, data=tmp_path / "rows.jsonl", plan=ULYSSES, steps=1)
    gradients, before, after, seen, _ = ranks(2).run(train_one_step, chosen, timeout=180)[0]
    assert seen == []
    for name, gradient in gradients.items():
        tower = name.startswith("model.visual.")
        assert (gradient is None) == tower
        assert torch.equal(before[name], after[name]) == tower


def unlabelled_rows(folder, target, rows):
    """A data file in which some rows (from 0) have no label."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("model"))
    found = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        found[row]["labels"] = [IGNORED] * len(found[row]["labels"])
    text = "".join(json.dumps(row) + "\n" for row in found)
    (target / "rows.jsonl").write_text(text)
    return target / "rows.jsonl"


def weights_and_moments(options):
    """Whether each step moves weights, and what AdamW keeps before and after it."""
    settings = Settings(**options)
    job = prepare(settings, CPU)
    trainer = Trainer(settings, build_model(settings, job, CPU), CPU)
    group = dist.new_group(backend="gloo")
    moved, counts = [], []
    with Loader(job.reading, job.rows, job.images, job.config, job.bound, group) as batches:
        for batch in batches:
            before = [local_part(p.detach()).clone() for p in trainer.model.parameters()]
            states = copy.deepcopy(trainer.optimizer.state_dict()["state"])
            trainer.step(batch)
            after = [local_part(p.detach()) for p in trainer.model.parameters()]
            moved.append(not all(map(torch.equal, before, after)))
            now = trainer.optimizer.state_dict()["state"]
            if not moved[-1]:
                assert states.keys() == now.keys()
                for kept, found in zip(states.values(), now.values(), strict=True):
                    assert all(torch.equal(whole(kept[key]), whole(found[key])) for key in kept)
            counts.append(max((int(state["step"]) for state in now.values()), default=0))
    return moved, counts, trainer.unlabelled


def test_a_step_without_labels_moves_nothing_and_keeps_its_place(ranks, folder, tmp_path):
    data = unlabelled_rows(folder, tmp_path / "rows", [3, 4, 5])  # all of step 2
    chosen = options(folder, plan="plans/baseline_dp.py", data=data, batch=3, steps=4, warmup=0)
    chosen |= {"schedule": "constant"}
    found = ranks(2).run(weights_and_moments, chosen, timeout=180)
    assert found == [([True, False, True, True], [1, 1, 2, 3], 1)] * 2
    metrics = tmp_path / "metrics.jsonl"
    again = chosen | {"metrics": metrics, "batch": 1, "steps": 8, "schedule": "cosine"}
    assert ranks(2).run(run_train, again, timeout=180) == [0, 0]
    lines = read_metrics(metrics)
    assert [line["unlabelled"] for line in lines] == [0, 0, 0, 1, 2, 3, 3, 3]
    assert [line["loss"] == line["grad_norm"] == line["labels"] == 0 for line in lines] == [
        False, False, False, True, True, True, False, False,
    ]  # fmt: skip
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    rates = [LR * (1 + math.cos(math.pi * done / 8)) / 2 for done in range(8)]
    assert [line["lr"] for line in lines] == pytest.approx(rates)


@pytest.mark.parametrize("plan", ["baseline_dp", "vision_cp_ulysses"])
def test_bfloat16_computes_with_parameters_and_sums_in_float32(ranks, folder, tmp_path, plan):
    metrics = tmp_path / "metrics.jsonl"
    chosen = options(folder, plan=f"plans/{plan}.py", dtype="bfloat16", metrics=metrics)
    assert ranks(2).run(run_train, chosen, timeout=180) == [0, 0]
    losses = [line["loss"] for line in read_metrics(metrics)]
    assert losses == pytest.approx(reference(folder)[0], rel=0.02)  # bf16 keeps 8 bits
    assert losses != pytest.approx(reference(folder)[0], rel=1e-6)
    *_, dtypes = ranks(2).run(train_one_step, chosen | {"steps": 1, "metrics": None}, timeout=180)[
        0
    ]
    assert dtypes == {"torch.float32"}


@pytest.mark.parametrize(
    ("rank", "step", "number", "lines"),
    [(1, 2, signal.SIGINT, 2), (0, 1, signal.SIGTERM, 1), (1, 0, signal.SIGTERM, None)],
)
def test_a_signal_to_one_rank_stops_all_after_the_step(
    ranks, folder, tmp_path, rank, step, number, lines
):
    metrics, save = tmp_path / "metrics.jsonl", tmp_path / "export"
    chosen = options(folder, plan="plans/baseline_dp.py", metrics=metrics, save=save)
    statuses = ranks(2).run(run_train, chosen, rank, step, number, timeout=180)
    assert statuses == [128 + number] * 2
    if lines is None:
        assert list(tmp_path.iterdir()) == []
        return
    assert len(read_metrics(metrics)) == lines
    assert json.loads((save / "training.json").read_text())["steps_done"] == lines
    again = chosen | {"metrics": tmp_path / "again.jsonl", "steps": 1, "model": save, "save": None}
    assert ranks(2).run(run_train, again, timeout=180) == [0, 0]  # what was exported is whole


def test_weights_that_are_not_finite_are_not_exported(ranks, folder, tmp_path):
    save = tmp_path / "out" / "export"
    chosen = options(folder, plan="plans/baseline_dp.py", steps=1, lr=1e39, clip=0.0, warmup=0)
    one, other = ranks(2).run(run_train, chosen | {"save": save}, timeout=180)
    assert one == other
    assert one.startswith("weights are not finite after step 1: model.visual.patch_embed.proj.")
    assert "step 1 had loss 4." in one and one.endswith("\n  nothing is exported")
    assert list(save.parent.iterdir()) == []


def guarded_train(options):
    """Train while no function of torch.cuda may be called from this project's own files."""
    project = (str(ROOT / "vlshard"), str(ROOT / "model"), str(ROOT / "examples"))
    calls = []

    def watch(frame, event, _argument):
        code, caller = frame.f_code, frame.f_back
        inside = f"{os.sep}torch{os.sep}cuda{os.sep}" in code.co_filename
        if event == "call" and inside and caller.f_code.co_filename.startswith(project):
            calls.append(f"{caller.f_code.co_filename}: {code.co_name}")

    sys.setprofile(watch)
    try:
        status = run_train(options)
    finally:
        sys.setprofile(None)
    return status, calls, "torch_npu" in sys.modules


def test_a_cpu_run_asks_nothing_of_torch_cuda(ranks, folder):
    chosen = options(folder, plan="plans/baseline_dp.py", steps=2)
    assert ranks(2).run(guarded_train, chosen, timeout=180) == [(0, [], False)] * 2
