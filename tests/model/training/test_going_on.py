"""Runs that stop and go on: the same numbers, the same rows, and what is refused."""

import json
import shutil

import pytest

from model.checkpoint.steps import read_run
from tests.train_folder import make_folder, options, read_metrics, run_train, write_rows

# The tower has its first gradient in step 3, after the checkpoint.
TEXT_FIRST = [[], [], [], [], [(16, 24)], [(8, 8)], [], [(24, 16)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with weights and the processor's settings, and rows with images."""
    path = make_folder(tmp_path_factory.mktemp("going_on"))
    write_rows(path, TEXT_FIRST)
    return path


def run_all(runs):
    """Several runs, one after another; their statuses or errors."""
    return [run_train(run) for run in runs]


def steps_of(path, *keys):
    """Some numbers of each step."""
    lines = [line for line in read_metrics(path) if "loss" in line]
    return [tuple(line[key] for key in keys) for line in lines]


def losses(path):
    return steps_of(path, "step", "loss", "grad_norm", "tokens")


def exported(path):
    return (path / "model.safetensors").read_bytes()


WORLDS = [("single", 1), ("vision_cp_ulysses", 2), ("vision_hsdp", 4)]


@pytest.mark.parametrize(("plan", "world"), WORLDS)
def test_a_run_goes_on_bit_for_bit(ranks, folder, tmp_path, plan, world):
    place = tmp_path / "checkpoints"

    def run(name, **more):
        paths = {"metrics": tmp_path / f"{name}.jsonl", "save": tmp_path / name}
        return options(folder, plan=f"plans/{plan}.py", batch=2, steps=4, **paths, **more)

    straight = run("straight")
    first = run("other", checkpoint=place, stop_after=2)
    second = run("other", checkpoint=place, resume="auto")
    found = ranks(world).run(run_all, [straight, first, second], timeout=240)
    assert found == [[0, 0, 0]] * world
    assert losses(tmp_path / "other.jsonl") == losses(tmp_path / "straight.jsonl")
    assert exported(tmp_path / "other") == exported(tmp_path / "straight")
    counts = read_run(place / "step-00000002")["counts"]
    assert counts["lm_head.weight"] == 2
    assert [name for name in counts if ".visual." in name] == []
    counts = read_run(place / "step-00000004")["counts"]
    assert {counts[name] for name in counts if ".visual." not in name} == {4}
    assert {counts[name] for name in counts if ".visual." in name} == {2}


LENGTHS = [2**k for k in range(1, 6)]  # of rows, so that sums of them tell the rows


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Rows of text that the tokens of a step tell."""
    path = make_folder(tmp_path_factory.mktemp("counted"))
    rows = [{"input_ids": [1] * n, "labels": [2] * n} for n in LENGTHS]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path):
    return [tokens for (tokens,) in steps_of(path, "tokens")]


def test_the_data_goes_on_by_rows(ranks, counted, tmp_path):
    place = tmp_path / "checkpoints"

    def run(name, **more):
        settings = {"batch": 2, "steps": 12, "shuffle": True, "seed": 3, **more}
        return options(counted, metrics=tmp_path / f"{name}.jsonl", **settings)

    runs = [
        run("straight"),
        run("first", checkpoint=place, stop_after=7),
        run("same", resume=place),
    ]
    assert ranks(1).run(run_all, runs, timeout=240) == [[0, 0, 0]]
    assert read_run(place / "step-00000007")["position"] == {"passes": 2, "rows": 4}
    straight, first, same = (losses(tmp_path / f"{n}.jsonl") for n in ("straight", "first", "same"))
    assert first + same == straight
    # From row 14 on with one row a step, under another plan.
    other = {"plan": "plans/vision_dp1.py", "batch": 1}
    found = ranks(2).run(run_all, [run("other", resume=place, **other)], timeout=240)
    assert found == [[0], [0]]
    steps = [step for (step,) in steps_of(tmp_path / "other.jsonl", "step")]
    tokens, straight = rows_of(tmp_path / "other.jsonl"), rows_of(tmp_path / "straight.jsonl")
    assert steps == [8, 9, 10, 11, 12]
    # Row 14 ends the third pass; 15 to 18 are of the fourth, each once.
    assert [tokens[0] + tokens[1], tokens[2] + tokens[3]] == straight[7:9]
    assert sum(tokens[1:]).bit_count() == 4


CHANGES = {
    "seed": (4, "--seed is 4, it was 0"),
    "steps": (9, "--steps is 9, it was 4"),
    "lr": (1e-3, "--lr is 0.001, it was 0.002"),
    "weight_decay": (0.0, "--weight-decay is 0.0, it was 0.1"),
    "schedule": ("constant", "--schedule is constant, it was cosine"),
    "warmup": (1, "--warmup is 1, it was 2"),
    "clip": (0.5, "--clip is 0.5, it was 1.0"),
    "shuffle": (True, "--shuffle is True, it was False"),
    "dtype": ("bfloat16", "--dtype is bfloat16, it was float32"),
}


@pytest.fixture(scope="module")
def stopped(ranks, folder, tmp_path_factory):
    """The command of a run that stopped after two steps of four, and its checkpoints."""
    place = tmp_path_factory.mktemp("stopped") / "checkpoints"
    run = options(folder, plan="plans/single.py", batch=2, steps=4, checkpoint=place)
    more = {"checkpoint_every": 1, "stop_after": 2}
    assert ranks(1).run(run_all, [run | more], timeout=120) == [[0]]
    return run


def test_a_changed_setting_is_refused_by_name(ranks, stopped):
    runs = [stopped | {"resume": "auto", name: value} for name, (value, _) in CHANGES.items()]
    [found] = ranks(1).run(run_all, runs, timeout=120)
    where = f"{stopped['checkpoint']}/step-00000002 is of a run with other settings"
    fix = "fix: give what it was saved with, or add --resume-anyway"
    assert found == [f"{where}\n  {text}\n  {fix}" for _, text in CHANGES.values()]


def test_changed_data_and_config_are_refused_by_name(ranks, stopped, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    lines = (folder / "rows.jsonl").read_text().splitlines()
    swapped = [lines[1], lines[0], *lines[2:]]
    runs = [
        write_lines(tmp_path / "other" / f"{name}.jsonl", rows)
        for name, rows in (("more", [*lines, lines[0]]), ("swapped", swapped))
    ]
    runs = [stopped | {"resume": "auto", "data": data} for data in runs]
    config = json.loads((folder / "model" / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 0.5
    (tmp_path / "other" / "model" / "config.json").write_text(json.dumps(config))
    runs.append(stopped | {"resume": "auto", "model": tmp_path / "other" / "model"})
    [found] = ranks(1).run(run_all, runs, timeout=120)
    assert found[0].splitlines()[1].startswith("  --data has 9 rows, checksum ")
    assert found[1].splitlines()[1].startswith("  --data has 8 rows, checksum ")
    assert "the config's text.rms_norm_eps is 0.5, it was 1e-06" in found[2]


def test_a_changed_run_goes_on_where_that_is_asked_for(ranks, stopped, tmp_path):
    more = {"seed": 4, "resume_anyway": True, "resume": stopped["checkpoint"], "checkpoint": None}
    run = stopped | more | {"metrics": tmp_path / "metrics.jsonl"}
    assert ranks(1).run(run_all, [run], timeout=120) == [[0]]
    assert [step for (step,) in steps_of(tmp_path / "metrics.jsonl", "step")] == [3, 4]


def write_lines(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    for file in path.parent.iterdir():
        file.unlink()


def add(path):
    (path.parent / "more.safetensors").write_bytes(b"")


def weights_of(folder):
    return next(folder.glob("*.safetensors"))


DAMAGES = {
    "weights cut": (weights_of, cut, "has {less:,} bytes, {size:,} were written"),
    "weights flipped": (weights_of, flip, "has other bytes than were written"),
    "weights gone": (weights_of, lambda path: path.unlink(), "cannot be read: No such file"),
    "a file more": (weights_of, add, "more.safetensors is there, but was not saved with it"),
    "run.json cut": (lambda folder: folder / "run.json", cut, "is not what was written"),
    "run.json flipped": (lambda folder: folder / "run.json", flip, "is not what was written"),
    "an empty folder": (lambda folder: folder / "run.json", empty, "cannot be read: No such file"),
}


def test_a_damaged_checkpoint_is_refused_or_passed_over(ranks, stopped, tmp_path):
    runs, texts = [], []
    for i, (find, damage, text) in enumerate(DAMAGES.values()):
        place = tmp_path / str(i)
        shutil.copytree(stopped["checkpoint"], place)
        (place / "step-00000009.part").mkdir()
        path = find(place / "step-00000002")
        size = path.stat().st_size
        damage(path)
        texts.append(text.format(size=size, less=size - 1))
        runs.append(stopped | {"checkpoint": None, "resume": place / "step-00000002"})
        paths = {"checkpoint": place, "metrics": tmp_path / f"{i}.jsonl"}
        runs.append(stopped | paths | {"resume": "auto", "stop_after": 3})
    [found] = ranks(1).run(run_all, runs, timeout=240)
    for i, text in enumerate(texts):
        assert text in found[2 * i]
        assert found[2 * i + 1] == 0
        assert [step for (step,) in steps_of(tmp_path / f"{i}.jsonl", "step")] == [2, 3]
        names = sorted(path.name for path in (tmp_path / str(i)).iterdir())
        assert names == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_run_does_not_start_over_what_is_there(ranks, stopped, folder, tmp_path):
    place = tmp_path / "checkpoints"
    (place / "step-00000003").mkdir(parents=True)
    damaged = options(folder, batch=2, steps=4, checkpoint=place, resume="auto")
    [found] = ranks(1).run(run_all, [stopped, damaged], timeout=120)
    assert "add --resume auto to go on, or name another folder" in found[0]
    assert "no whole checkpoint in" in found[1]
    assert "remove what is left of these to start at step 1" in found[1]
