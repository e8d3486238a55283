import json
import os

import pytest

from model.checkpoint.headers import CheckpointError
from model.config.config import Config
from model.training.outputs import check_outputs
from model.training.settings import Settings
from tests.tables import RAW

CONFIG = Config.from_dict(RAW)


@pytest.fixture
def inputs(tmp_path):
    """A model folder without weights, rows and a plan."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(RAW))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "plan.py").write_text("")
    return tmp_path


def check(inputs, **changes):
    found = {"plan": str(inputs / "plan.py"), "model": inputs / "model"}
    found |= {"data": inputs / "rows.jsonl", "steps": 1, "batch": 1}
    check_outputs(Settings(**found, **changes), CONFIG)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_places_are_tried_and_left_as_they_were(inputs):
    (inputs / "empty.jsonl").write_text("")  # of a run that did no step
    before = contents(inputs)
    check(inputs, metrics=inputs / "m.jsonl", plot=inputs / "p.png", save=inputs / "out")
    check(inputs, metrics=inputs / "empty.jsonl", save=inputs / "out")
    check(inputs, metrics=inputs / "null")
    assert contents(inputs) == before
    check(
        inputs, metrics=inputs / "new" / "folder" / "m.jsonl", save=inputs / "deep" / "er" / "out"
    )
    assert [path.name for path in (inputs / "new").iterdir()] == ["folder"]


def old_metrics(path):
    (path / "m.jsonl").write_text('{"step": 1}\n')
    return {"metrics": path / "m.jsonl"}


def old_plot(path):
    (path / "p.png").write_bytes(b"x")
    return {"plot": path / "p.png"}


def the_model(path):
    return {"save": path / "model"}


def the_model_through_a_link(path):
    (path / "link").symlink_to(path / "model")
    return {"save": path / "link"}


def another_model(path):
    (path / "other").mkdir()
    (path / "other" / "config.json").write_text("{}")
    (path / "other" / "model.safetensors").write_bytes(b"x")
    return {"save": path / "other"}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (old_metrics, "m.jsonl exists: name another file, or add --overwrite"),
        (old_plot, "p.png exists: name another file, or add --overwrite"),
        (the_model, "--save and --model both name "),
        (the_model_through_a_link, "--save and --model both name "),
        (another_model, "holds a checkpoint without training.json, so no export of training"),
    ],
)
def test_what_was_there_is_replaced_only_if_asked_for(inputs, make, text):
    changes = make(inputs)
    before = contents(inputs)
    with pytest.raises((OSError, CheckpointError)) as error:
        check(inputs, **changes)
    assert text in str(error.value)
    check(inputs, **changes, overwrite=True)
    assert contents(inputs) == before


def an_older_export(path):
    another_model(path)
    (path / "other" / "training.json").write_text("{}")
    return {"save": path / "other"}


def test_an_older_export_of_training_is_replaced(inputs):
    check(inputs, **an_older_export(inputs))


def data(path):
    return {"metrics": path / "rows.jsonl"}


def data_by_another_name(path):
    os.link(path / "rows.jsonl", path / "again.jsonl")
    return {"plot": path / "again.jsonl"}


def data_by_another_way(path):
    return {"metrics": path / "model" / ".." / "rows.jsonl"}


def plan(path):
    return {"metrics": path / "plan.py"}


def config(path):
    return {"metrics": path / "model" / "config.json"}


def both(path):
    return {"metrics": path / "a.png", "plot": path / "model" / ".." / "a.png"}


def in_the_export(path):
    return {"metrics": path / "out" / "m.jsonl", "save": path / "out"}


def as_the_export(path):
    return {"plot": path / "out.png", "save": path / "out.png"}


def a_folder(path):
    (path / "folder").mkdir()
    return {"metrics": path / "folder"}


def below_a_file(path):
    return {"metrics": path / "rows.jsonl" / "m.jsonl"}


def a_loop(path):
    (path / "loop").symlink_to(path / "loop")
    return {"save": path / "loop"}


def a_loop_as_file(path):
    return {"metrics": a_loop(path)["save"]}


def export_below_a_file(path):
    return {"save": path / "rows.jsonl" / "out"}


def a_pipe(path):
    os.mkfifo(path / "pipe")
    return {"metrics": path / "pipe"}


def no_picture(path):
    return {"plot": path / "p.docx"}


def above_the_data(path):
    return {"save": path}


def a_file_as_export(path):
    return {"save": path / "rows.jsonl"}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (data, "--metrics and --data both name {}/rows.jsonl: it would be overwritten"),
        (data_by_another_name, "--plot and --data both name {}/again.jsonl: it would be"),
        (data_by_another_way, "--metrics and --data both name {}/model/../rows.jsonl"),
        (plan, "--metrics and --plan both name {}/plan.py"),
        (config, "--metrics {}/model/config.json is a file of --model"),
        (both, "--metrics and --plot both name "),
        (in_the_export, "--metrics {}/out/m.jsonl lies in {}/out, which --save replaces"),
        (as_the_export, "--plot {}/out.png lies in {}/out.png, which --save replaces"),
        (a_folder, "{}/folder cannot be written to: Is a directory"),
        (below_a_file, "{}/rows.jsonl/m.jsonl cannot be written to: File exists"),
        (export_below_a_file, "{}/rows.jsonl/out cannot be written to: File exists"),
        (a_loop, "{}/loop cannot be written to: "),
        (a_loop_as_file, "{}/loop cannot be written to: "),
        (a_pipe, "{}/pipe cannot be written to: No such device or address"),
        (no_picture, "{}/p.docx is no picture that can be drawn"),
        (above_the_data, "{} holds model, plan.py, rows.jsonl, which no export writes"),
        (a_file_as_export, "{}/rows.jsonl is not a folder: nothing is written over it"),
    ],
)
def test_what_must_not_be_written_is_refused_whatever_is_asked_for(inputs, make, text):
    changes = make(inputs)
    before = contents(inputs)
    with pytest.raises((OSError, CheckpointError)) as error:
        check(inputs, **changes, overwrite=True)
    assert text.replace("{}", str(inputs)) in str(error.value)
    assert contents(inputs) == before


def test_the_export_before_a_kill_is_put_back_and_told(inputs, capsys):
    left = inputs / f".out.old-{2**30}-"
    left.mkdir()
    (left / "config.json").write_text("{}")
    (left / "training.json").write_text("{}")
    check(inputs, save=inputs / "out")
    assert sorted(path.name for path in (inputs / "out").iterdir()) == [
        "config.json",
        "training.json",
    ]
    told = f"{inputs}/out: an export was killed on its way; the one before it is back\n"
    assert capsys.readouterr().out == told
