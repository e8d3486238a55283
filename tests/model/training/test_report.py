import io
import json

import pytest

from model.training import report
from model.training.report import say, tell


@pytest.mark.parametrize("path", ["/dev/full", "closed"])
def test_a_line_that_nobody_reads_is_no_error(path, tmp_path):
    with open("/dev/full" if path == "/dev/full" else tmp_path / "x", "w") as stream:
        if path == "closed":
            stream.close()
        assert not say("a line", stream)
        if path == "/dev/full":
            assert say("another", stream)  # goes nowhere from now on


def test_a_line_is_written_at_once():
    stream = io.StringIO()
    assert say("a line", stream)
    assert stream.getvalue() == "a line\n"


def test_an_error_is_told_by_rank_0_and_given_to_torchrun(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(report, "REPORT_SECONDS", 0.0)
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert tell(ValueError("no such row")) == 1
        found = json.loads(file.read_text())
        assert isinstance(found.pop("time"), float)
        assert found == {"message": "no such row", "status": 1}
    assert capsys.readouterr().err == "error: no such row\n"
    assert tell(ValueError("no such row"), speak=False) == 1
    assert capsys.readouterr().err == ""
