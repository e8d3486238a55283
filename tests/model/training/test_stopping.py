"""Runs that are stopped, by a signal, a bad row or a full disk: a whole checkpoint, or none."""

import errno
import json
import signal
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from model.checkpoint import steps
from model.checkpoint.__main__ import main
from model.checkpoint.steps import read_run
from tests.train_folder import (
    STEP,
    broken_rows,
    make_folder,
    options,
    read_metrics,
    run_train,
)

BAD = json.dumps({"input_ids": [1, 2], "labels": [1]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with weights and the processor's settings, and rows with images."""
    return make_folder(tmp_path_factory.mktemp("stopping"))


def names(place):
    return sorted(path.name for path in place.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_in_place_of_an_export(ranks, folder, tmp_path, number):
    place = tmp_path / "checkpoints"
    run = options(folder, plan="plans/vision_dp1.py", checkpoint=place, save=tmp_path / "out")
    assert ranks(2).run(run_train, run, 1, 2, number, timeout=120) == [128 + number] * 2
    assert names(place) == ["step-00000002"]
    assert names(tmp_path) == ["checkpoints"]


def test_a_bad_row_stops_a_run_with_a_checkpoint(ranks, folder, tmp_path):
    data = broken_rows(folder, tmp_path / "broken", 5, BAD)
    place = tmp_path / "checkpoints"
    run = options(folder, plan="plans/vision_dp1.py", checkpoint=place, data=data)
    first, second = ranks(2).run(run_train, run, timeout=120)
    assert first == second
    assert f"{data}:5: found 2 input_ids and 1 labels, expected one label a token" in first
    assert "a checkpoint of step 1 is written: --resume auto goes on from it" in first
    assert names(place) == ["step-00000001"]


@pytest.mark.parametrize("pack", [False, True])
def test_bad_rows_are_skipped_where_that_is_asked_for(ranks, folder, tmp_path, pack):
    data = broken_rows(folder, tmp_path / "broken", 5, BAD)
    image = tmp_path / "broken" / "2.1.png"
    image.write_bytes(image.read_bytes()[:-40])
    metrics = tmp_path / "metrics.jsonl"
    run = options(folder, plan="plans/vision_cp_colossal.py", data=data, metrics=metrics)
    assert ranks(2).run(run_train, run | {"skip_bad": True, "pack": pack}, timeout=120) == [0, 0]
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    lengths = [0 if i in (2, 4) else len(row["input_ids"]) for i, row in enumerate(rows)]
    steps = [line for line in read_metrics(metrics) if "loss" in line]
    expected = [sum(lengths[i % 7] for i in range(3 * k, 3 * k + 3)) for k in range(5)]
    assert [line["tokens"] for line in steps] == expected
    images = [1, 0, 0, 0, 0, 0, 1]
    expected = [sum(images[i % 7] for i in range(3 * k, 3 * k + 3)) for k in range(5)]
    assert [line["images"] for line in steps] == expected


def test_all_data_is_checked_first_and_all_faults_are_listed(ranks, folder, tmp_path):
    data = broken_rows(folder, tmp_path / "broken", 5, BAD)
    (tmp_path / "broken" / "2.1.png").unlink()
    run = options(folder, plan="plans/vision_dp1.py", data=data, check_data=True, steps=1)
    assert ranks(2).run(run_train, run, timeout=120) == [3, 3]
    good = options(folder, plan="plans/vision_dp1.py", check_data=True, steps=1)
    assert ranks(2).run(run_train, good, timeout=120) == [0, 0]


def run_broken(run, step):
    """The error of a run whose weights are not finite after a step, on one rank."""

    def steps(trainer, batch, signal=0):
        found = STEP(trainer, batch, signal)
        if batch.step == step and dist.get_rank() == 1:
            with torch.no_grad():
                dict(trainer.model.named_parameters())["lm_head.weight"].to_local()[0, 0] = (
                    torch.inf
                )
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.train_folder.STEP", steps)
        return run_train(run)


def test_what_is_not_finite_is_not_written(ranks, folder, tmp_path):
    place = tmp_path / "checkpoints"
    run = options(folder, plan="plans/vision_dp1.py", checkpoint=place, checkpoint_every=1)
    first, second = ranks(2).run(run_broken, run, 3, timeout=120)
    assert first == second
    assert first.startswith("values are not finite after step 3: lm_head.weight\n")
    assert names(place) == ["step-00000001", "step-00000002"]


def run_without_room(run, rank, where, fault):
    """The error of a run in which a rank cannot write from the second checkpoint on."""
    calls = []

    def once(*_):
        calls.append(1)
        raise OSError(fault, "as tested")

    def steps(trainer, batch, signal=0):
        if batch.step == 2 and dist.get_rank() == rank:
            patch.setattr(where, once)
        return STEP(trainer, batch, signal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.train_folder.STEP", steps)
        return run_train(run)


PLACES = {
    "weights on rank 1": (1, "vlshard.storage.saved._Noted.write", errno.ENOSPC),
    "run.json": (0, "model.checkpoint.steps.write_run", errno.ENOSPC),
    "renaming": (0, "model.checkpoint.steps.put_in_place", errno.EROFS),
}


@pytest.mark.parametrize("where", PLACES)
def test_a_checkpoint_that_cannot_be_written_leaves_those_before_it(ranks, folder, tmp_path, where):
    place = tmp_path / "checkpoints"
    run = options(folder, plan="plans/vision_dp1.py", checkpoint=place, checkpoint_every=1)
    first, second = ranks(2).run(run_without_room, run, *PLACES[where], timeout=120)
    assert first == second
    assert "cannot be written" in first
    assert "as tested" in first
    assert names(place) == ["step-00000001"]
    assert read_run(place / "step-00000001")["step"] == 1


def test_old_checkpoints_go(ranks, folder, tmp_path):
    place = tmp_path / "checkpoints"
    (place / "step-00000004.part").mkdir(parents=True)
    run = options(folder, checkpoint=place, checkpoint_every=1, keep=2)
    assert ranks(1).run(run_train, run, timeout=120) == [0]
    assert names(place) == ["step-00000004", "step-00000005"]


def run_behind(run):
    """Checkpoints written in the background, slowly, while weights move on."""
    write = steps.save_tensors

    def slowly(*args):
        time.sleep(0.3)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.checkpoint.steps.save_tensors", slowly)
        return run_train(run)


def test_what_is_written_in_the_background_is_of_its_step(ranks, folder, tmp_path):
    def run(name, **more):
        paths = {"checkpoint": tmp_path / name, "checkpoint_every": 1}
        return options(folder, plan="plans/vision_dp1.py", **paths, **more)

    assert ranks(2).run(run_train, run("now"), timeout=120) == [0, 0]
    assert ranks(2).run(run_behind, run("behind", checkpoint_async=True), timeout=120) == [0, 0]
    assert names(tmp_path / "behind") == names(tmp_path / "now")
    for name in names(tmp_path / "now"):
        now, behind = (files_of(tmp_path / kind / name) for kind in ("now", "behind"))
        assert now.keys() == behind.keys()
        assert all(torch.equal(now[key], behind[key]) for key in now)


def files_of(folder):
    """The tensors of all files; the order of what a header says beside them is not fixed."""
    paths = sorted(folder.glob("*.safetensors"))
    return {(path.name, key): x for path in paths for key, x in load_file(path).items()}


def test_a_checkpoint_is_exported_and_inspected(ranks, folder, tmp_path, capsys):
    place = tmp_path / "checkpoints"
    frozen = {"freeze": ("model.visual.*",), "checkpoint": place, "save": tmp_path / "straight"}
    run = options(folder, plan="plans/vision_hsdp.py", **frozen)
    assert ranks(4).run(run_train, run, timeout=120) == [0] * 4
    last = place / "step-00000005"
    assert main(["export", str(last), "--out", str(tmp_path / "out")]) == 0
    assert main(["inspect", str(last), "--tensors"]) == 0
    told = capsys.readouterr().out
    assert "step 5 of 5 of run" in told
    assert "lm_head.weight.exp_avg_sq [96, 64] float32, norm " in told
    assert "model.visual." not in told
    for name in ("model.safetensors", "config.json", "preprocessor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    flip(next(last.glob("*.safetensors")))
    assert main(["export", str(last), "--out", str(tmp_path / "other")]) == 1
    assert "has other bytes than were written" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
