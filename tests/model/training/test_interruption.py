import signal
import subprocess
import sys
import time

import pytest

from model.training import interruption
from model.training.interruption import Interruption, status_of

BUSY = """
import ctypes
from model.training.interruption import Interruption

noted = Interruption()
noted.install()
print("ready", flush=True)
mutex = ctypes.create_string_buffer(64)
for _ in range(2):  # waits for ever, outside Python, as in a collective
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def started():
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGTERM, signal.SIGINT, 143),
    ],
)
def test_a_second_signal_ends_a_process_that_waits_outside_python(first, second, status):
    process = started()
    process.send_signal(first)
    time.sleep(0.1)
    process.send_signal(first)  # as a launcher hands on what the terminal has sent already
    time.sleep(interruption.ECHO_SECONDS)
    assert process.poll() is None
    process.send_signal(second)
    _, errors = process.communicate(timeout=5)
    assert process.returncode == status
    name = first.name
    assert (
        errors == f"{name}: stopping after this step; a second one ends at once, saving nothing\n"
    )


class Ended:
    """Other ranks, one of which has ended."""

    def __init__(self, status):
        self.status, self.told = status, []

    def end(self, status):
        self.told.append(status)

    def ended(self):
        if isinstance(self.status, Exception):
            raise self.status
        return self.status


def test_the_first_signal_is_noted_and_the_second_told_to_others(monkeypatch, capsys):
    left = []
    monkeypatch.setattr(interruption.os, "_exit", left.append)
    monkeypatch.setattr(interruption, "ECHO_SECONDS", 0.0)
    noted = Interruption()
    noted.others = Ended(None)
    assert (noted.signal, status_of(noted.signal)) == (0, 0)
    noted.note(signal.SIGTERM)
    assert (noted.signal, status_of(noted.signal), left) == (15, 143, [])
    noted.note(signal.SIGINT)
    assert (noted.signal, left, noted.others.told) == (15, [143], [143])


def test_an_end_of_others_is_looked_up_while_they_can_be_asked():
    noted = Interruption()
    assert noted.ended_by_others() is None
    noted.others = Ended(130)
    assert noted.ended_by_others() == 130
    noted.others = Ended(ConnectionError("the store has gone"))
    assert noted.ended_by_others() is None
    assert noted.others is None
