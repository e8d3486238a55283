import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from model.training.journal import Journal
from model.training.plot import check_picture
from model.training.record import EvalRecord, Spread, StepRecord, kept_rows


def record(step, loss=2.5):
    return StepRecord(step, loss, 1.25, 1e-3, 120, 40, 6, 0.5, (8, 12), (30, 34))


def journal(steps, *, terminal, **files):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    return Journal(steps, console=console, **files), console.file


def test_journal_writes_one_object_a_step_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log, _ = journal(2, terminal=False, metrics=path)
    with log:
        log.add(record(1))
        _, line = path.read_text().splitlines()
        assert json.loads(line) == {
            "step": 1,
            "loss": 2.5,
            "grad_norm": 1.25,
            "lr": 1e-3,
            "tokens": 120,
            "labels": 40,
            "images": 6,
            "seconds": 0.5,
            "vision_rows": [8, 12],
            "text_rows": [30, 34],
            "unlabelled": 0,
            "epoch": 0.0,
            "tokens_per_second": 0.0,
            "model_flops": 0,
            "flops_per_second": 0.0,
            "peak_share": None,
            "peak_mib": [],
            "data_seconds": 0.0,
            "forward_seconds": 0.0,
            "backward_seconds": 0.0,
            "exchange_seconds": 0.0,
            "update_seconds": 0.0,
            "lrs": {},
            "aux_loss": None,
        }
        log.add(record(2))
    assert len(path.read_text().splitlines()) == 3


def test_journal_prints_lines_where_there_is_no_terminal():
    log, output = journal(9, terminal=False)
    with log:
        for step in range(1, 10):
            log.add(record(step))
    first, last = output.getvalue().splitlines()
    rates = "loss 2.5000  grad norm 1.250  240 tokens/s  12.0 images/s"
    assert first == f"step 1/9  {rates}  4 s left"
    assert last == f"step 9/9  {rates}  0 s left"


def test_journal_shows_a_bar_on_a_terminal():
    log, output = journal(3, terminal=True)
    with log:
        for step in range(1, 4):
            log.add(record(step))
    assert "3/3" in output.getvalue() and "grad norm 1.250" in output.getvalue()


def test_journal_shows_evaluations_and_the_share_of_the_peak():
    log, output = journal(2, terminal=False)
    with log:
        log.add(replace(record(1), peak_share=0.415))
        log.add_evaluation(EvalRecord(1, 2.25, 0.5, 7, 80, 1200, 0.25, True))
        log.add_evaluation(EvalRecord(2, 2.5, 0.125, 7, 80, 1200, 0.25, False))
    first, *rest = output.getvalue().splitlines()
    assert first.endswith("12.0 images/s  41.5% of peak  0 s left")
    assert rest == [
        "step 1 evaluated: loss 2.2500  accuracy 50.00% of 1,200 tokens in 0.2 s  best so far",
        "step 2 evaluated: loss 2.5000  accuracy 12.50% of 1,200 tokens in 0.2 s",
    ]


def test_journal_draws_a_plot(tmp_path):
    log, _ = journal(2, terminal=False, plot=tmp_path / "plot.png")
    with log:
        log.add(record(1, 3.0))
        log.add(record(2, 2.0))
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.format == "PNG" and picture.width > 500


@pytest.mark.parametrize(
    ("name", "reason"), [("plot.docx", "is no picture that can be drawn"), ("a.png", "is a folder")]
)
def test_pictures_that_cannot_be_written_are_refused(tmp_path, name, reason):
    (tmp_path / "a.png").mkdir()
    check_picture(tmp_path / "plot.PNG")
    with pytest.raises(OSError, match=reason):
        check_picture(tmp_path / name)


def test_rows_of_many_ranks_are_kept_as_their_spread():
    assert kept_rows(range(64)) == tuple(range(64))
    assert kept_rows([3, *range(64)]) == Spread(min=0, mean=2019 / 65, max=63)


class Closed(io.StringIO):
    """Output that nobody reads any more."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_journal_that_nobody_reads_goes_on(tmp_path, capsys, terminal):
    console = Console(file=Closed(), force_terminal=terminal, width=120)
    metrics = tmp_path / "metrics.jsonl"
    with Journal(2, console=console, metrics=metrics) as log:
        log.add(record(1))
        log.add(record(2))
    assert len(metrics.read_text().splitlines()) == 3
    errors = capsys.readouterr().err
    assert errors.count("warning: progress cannot be shown: ") == 1


@pytest.mark.parametrize("metrics", ["/dev/full", "no/such/folder/metrics.jsonl"])
def test_metrics_that_cannot_be_written_are_told_once(capsys, metrics):
    log, output = journal(3, terminal=False, metrics=Path(metrics))
    with log:
        for step in (1, 2, 3):
            log.add(record(step))
    assert len(log.records) == 3 and "step 3/3" in output.getvalue()
    errors = capsys.readouterr().err.splitlines()
    assert errors == [f"warning: {metrics} cannot be written: {REASONS[metrics]}; the run goes on"]


REASONS = {
    "/dev/full": "No space left on device",
    "no/such/folder/metrics.jsonl": "No such file or directory",
}


def test_a_plot_that_cannot_be_drawn_is_told(tmp_path, capsys):
    log, _ = journal(1, terminal=False, plot=tmp_path / "gone" / "plot.png")
    with log:
        log.add(record(1))
    told = f"warning: {tmp_path}/gone/plot.png cannot be written: No such file or directory"
    assert capsys.readouterr().err == f"{told}; the run goes on\n"
