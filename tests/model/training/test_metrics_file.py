"""Whose a metrics file is, and going on with it."""

import json
from dataclasses import asdict

import pytest

from model.training.journal import Journal
from model.training.metrics_file import ForeignMetricsError, RunHead, check_metrics, run_of
from model.training.record import EvalRecord, Spread, StepRecord

HEAD = RunHead("5f2c01aa", plan="plans/single.py", ranks=2, steps=9)


def step(number, loss=2.5):
    return StepRecord(number, loss, 1.25, 1e-3, 120, 40, 6, 0.5, (8, 12), (30, 34))


def evaluation(number):
    return EvalRecord(number, 2.0, 0.5, 7, 80, 30, 0.25, number == 2)


def write(path, last, head=HEAD, after=0):
    """A run that does the steps behind ``after``, with an evaluation after every second."""
    with Journal(9, path, head=head, after=after) as log:
        for number in range(after + 1, last + 1):
            log.add(step(number, loss=10 * after + number))
            if number % 2 == 0:
                log.add_evaluation(evaluation(number))
    return log


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_first_line_says_whose_it_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert run_of(path) is None
    assert write(path, 2).written == {"metrics": path}
    first, *rest = lines(path)
    assert first == asdict(HEAD)
    assert [(line["step"], "eval_loss" in line) for line in rest] == [
        (1, False),
        (2, False),
        (2, True),
    ]
    assert run_of(path) == HEAD.run


@pytest.mark.parametrize("cut", ["", '{"step": 6, "lo', "no JSON\n"])
def test_the_same_run_goes_on_behind_the_step_that_it_resumes(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write(path, 5)
    path.write_text(path.read_text() + cut)
    log = write(path, 6, after=4)
    assert [(line["step"], line["loss"]) for line in lines(path) if "loss" in line] == [
        (1, 1), (2, 2), (3, 3), (4, 4), (5, 45), (6, 46),
    ]  # fmt: skip
    assert [line["step"] for line in lines(path) if "eval_loss" in line] == [2, 4, 6]
    assert [record.step for record in log.records] == [1, 2, 3, 4, 5, 6]
    assert log.evaluations == [evaluation(number) for number in (2, 4, 6)]


def test_an_evaluation_of_the_step_that_is_resumed_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 2)
    write(path, 3, after=2)
    assert [line["step"] for line in lines(path)[1:]] == [1, 2, 2, 3]


def test_another_run_is_refused_and_begins_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    check_metrics(path, HEAD.run)
    write(path, 3)
    check_metrics(path, HEAD.run)
    with pytest.raises(ForeignMetricsError) as error:
        check_metrics(path, "00000000")
    text = f"--metrics {path} is of run 5f2c01aa, this one goes on with run 00000000"
    assert str(error.value) == f"{text}: name another file, or add --overwrite"
    write(path, 4, head=RunHead("00000000"), after=3)
    assert [line.get("step") for line in lines(path)] == [None, 4, 4]


def test_what_no_run_has_written_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("to do\n")
    with pytest.raises(ForeignMetricsError, match="no metrics of a run"):
        check_metrics(path, HEAD.run)


def test_spreads_of_many_ranks_are_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Journal(1, path, head=HEAD) as log:
        log.add(StepRecord(1, 2.5, 1.0, 1e-3, 9, 9, 0, 0.5, Spread(0, 1.5, 3), (1,)))
    with Journal(2, path, head=HEAD, after=1) as log:
        pass
    assert log.records[0].vision_rows == {"min": 0, "mean": 1.5, "max": 3}
