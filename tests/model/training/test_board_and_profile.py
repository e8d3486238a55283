"""What is written for TensorBoard and for viewers of traces."""

import json
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from model.training.board import check_board
from model.training.command_line import SettingsError
from model.training.journal import Journal
from model.training.metrics_file import RunHead
from model.training.profiling import trace_path
from model.training.record import EvalRecord, StepRecord
from model.training.settings import Settings
from tests.train_folder import make_folder, options, run_train

REQUIRED = "--plan p.py --model m --data d.jsonl --steps 10 --batch 4".split()


def scalars(folder):
    """Each scalar of the event files of a folder: (name, step) to value; a file is TFRecords."""
    found, purged = {}, []
    for path in sorted(folder.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4  # length, its checksum, the event, its checksum
            purged += [event.step] if event.HasField("session_log") else []
            found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
    return found, purged


def step(number):
    return StepRecord(number, 2.5, 1.25, 1e-3, 120, 40, 6, 0.5, (8, 12), (30, 34))


def test_the_board_has_the_numbers_of_steps_and_evaluations(tmp_path):
    check_board()
    with Journal(2, board=tmp_path, head=RunHead("5f2c01aa")) as log:
        log.add(step(1))
        log.add(step(2))
        log.add_evaluation(EvalRecord(2, 2.25, 0.5, 7, 80, 30, 0.25, True))
    assert log.written == {"board": tmp_path}
    found, purged = scalars(tmp_path / "5f2c01aa")
    assert found["training/loss", 1] == found["training/loss", 2] == 2.5
    assert found["training/grad_norm", 2] == 1.25
    assert (found["evaluation/loss", 2], found["evaluation/accuracy", 2]) == (2.25, 0.5)
    assert purged == []


def test_a_board_that_goes_on_hides_later_steps(tmp_path):
    with Journal(2, board=tmp_path, head=RunHead("5f2c01aa"), after=4) as log:
        log.add(step(5))
    assert scalars(tmp_path / "5f2c01aa")[1] == [5]


def test_a_board_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with Journal(1, board=tmp_path / "file", head=RunHead("a")) as log:
        log.add(step(1))
    assert log.written == {}
    assert "warning: " in capsys.readouterr().err


def test_steps_to_profile_are_read():
    assert Settings.from_command_line([*REQUIRED, "--profile", "3:5"]).profile == (3, 5)
    for wrong in ("3", "5:3", "0:1", "a:b"):
        with pytest.raises(SettingsError, match="is not FROM:TO"):
            Settings.from_command_line([*REQUIRED, "--profile", wrong])


def test_each_rank_writes_a_trace_of_the_steps(ranks, tmp_path):
    folder = make_folder(tmp_path / "run")
    traces = {"profile": (2, 2), "profile_dir": tmp_path / "traces", "steps": 3}
    given = options(folder, plan="plans/baseline_dp.py") | traces
    assert ranks(2).run(run_train, given, timeout=60) == [0, 0]
    files = sorted((tmp_path / "traces").iterdir())
    assert files == [trace_path(tmp_path / "traces", rank) for rank in range(2)]
    events = json.loads(files[1].read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("Optimizer.step#AdamW.step") == 1
    assert "FSDP::root_post_backward_callback" in names
