import argparse
import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo import StageError, main, make_room, read_command, report, run_stage


def test_a_stage_that_fails_is_named():
    with pytest.raises(StageError) as error:
        run_stage("train", ["-c", "raise SystemExit(3)"])
    assert str(error.value) == "to train failed with status 3; see its output above"


def test_a_failed_stage_ends_the_demo(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "a"), "--seed", "-1"]) == 1
    assert "error: to make the data failed with status 1" in capsys.readouterr().out


def test_what_no_demo_made_is_kept(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(StageError, match="holds something that no demo made"):
        make_room(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_what_a_demo_left_is_removed(tmp_path):
    (tmp_path / "demo" / "model").mkdir(parents=True)
    (tmp_path / "demo" / "train.jsonl").write_text("{}")
    make_room(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_reading_is_isolated():
    assert read_command(Path("out"))[:2] == ["-I", "examples/read_digits.py"]


def test_report_shows_rows_losses_scores_and_paths(tmp_path):
    records = [
        {"run": "5f2c01aa"},
        {"loss": 6.5, "vision_rows": [300, 296], "text_rows": [640, 640]},
        {"loss": 0.25, "vision_rows": [400, 404], "text_rows": [704, 704]},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    scores = {"exact_match": 0.9375, "digits_right": 0.981, "examples": 512}
    shown = [{"images": ["a.png"], "truth": "90", "answer": "96"}]
    noise = {"exact_match": 0.031, "digits_right": 0.102, "examples": 512, "shown": []}
    reading = {"heldout": {**scores, "shown": shown}, "noise": noise}
    (tmp_path / "reading.json").write_text(json.dumps(reading))
    text = StringIO()
    console = Console(file=text, soft_wrap=True, width=100)
    report(console, argparse.Namespace(plan="plans/p.py", then_plan="plans/q.py"), tmp_path)
    for part in (
        "ranks: 2    plan: plans/p.py, then plans/q.py",
        "loss: 6.5000 at the start, 0.2500 at the end",
        "93.8%",
        "98.1%",
        "3.1%",
        "10.2%",
        "90 read as 96",
        f"plot: {tmp_path / 'loss.png'}",
        f"checkpoint: {tmp_path / 'export'}",
    ):
        assert part in text.getvalue()
    cells = [line.replace("│", " ").split() for line in text.getvalue().splitlines()]
    assert ["0", "700", "350.0", "1,344", "672.0"] in cells
    assert ["1", "700", "350.0", "1,344", "672.0"] in cells
