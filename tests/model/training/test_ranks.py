"""Why ranks have failed, as the one who started them tells it."""

import signal

import pytest

from model.training.program import main
from model.training.ranks import Ended, cause


def told(text, time):
    return {"message": text, "status": 1, "time": time}


LATER = Ended(0, 1, told("rank 0: RuntimeError: Connection closed by peer", 8.25))
CAUSES = {
    "an error that all share": (
        [Ended(0, 1, told("no such row", 1.5)), Ended(1, 1, told("no such row", 1.25))],
        ("no such row", 1),
    ),
    "the first error": (
        [LATER, Ended(1, 1, told("rank 1: KeyError: 'x'", 8.0))],
        ("rank 1: KeyError: 'x'", 1),
    ),
    "killed": (
        [LATER, Ended(1, -signal.SIGKILL, {})],
        ("rank 1 was killed by SIGKILL", 1),
    ),
    "ended by the launcher": (
        [Ended(0, -signal.SIGTERM, {}), Ended(1, 1, told("rank 1: KeyError: 'x'", 8.0))],
        ("rank 1: KeyError: 'x'", 1),
    ),
    "nothing told": ([Ended(1, 7, {})], ("rank 1 ended with status 7; see above", 1)),
    "stopped": ([Ended(1, 143, {}), Ended(0, 143, told("stopped by SIGTERM", 2.0))], ("", 143)),
    "stopped after one was killed": (
        [Ended(0, 143, told("stopped by SIGTERM", 2.0)), Ended(1, -signal.SIGABRT, {})],
        ("rank 1 was killed by SIGABRT", 1),
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_is_told(case):
    ended, expected = CAUSES[case]
    assert cause(ended) == expected


def test_ranks_are_not_started_twice(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    required = "--plan p.py --model m --data d.jsonl --steps 10 --batch 4 --ranks 2".split()
    with pytest.raises(SystemExit) as end:
        main(required)
    assert end.value.code == 1
    text = "error: --ranks starts ranks, but torchrun has: leave one of them out\n"
    assert capsys.readouterr().err == text
