"""Seconds by part, on the CPU and where an accelerator works behind the program."""

import time

import pytest
import torch

from model.training import stopwatch
from model.training.stopwatch import Stopwatch, peak_memory


def test_laps_of_a_part_add_up(monkeypatch):
    now = iter([10.0, 11.0, 13.0, 13.5, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch(torch.device("cpu"))
    for part in ("forward", "backward", "forward", "update"):
        watch.lap(part)
    assert watch.seconds() == {"forward": 1.5, "backward": 2.0, "update": 6.5}


class Event:
    """Marks of a device that is as far as the program; milliseconds."""

    clock = 0.0
    waited = 0

    def __init__(self, device, enable_timing):
        assert device.type == "cuda" and enable_timing

    def record(self):
        Event.clock += 250.0
        self.at = Event.clock

    def synchronize(self):
        Event.waited += 1

    def elapsed_time(self, later):
        return later.at - self.at


def test_marks_on_a_device_are_read_after_it_has_come_there(monkeypatch):
    monkeypatch.setattr(stopwatch.torch, "Event", Event)
    watch = Stopwatch(torch.device("cuda", 0))
    watch.lap("forward")
    watch.lap("backward")
    assert Event.waited == 0
    assert watch.seconds() == {"forward": 0.25, "backward": 0.25}
    assert Event.waited == 2


def test_the_peak_of_a_process_grows_with_what_it_holds():
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(64 * 2**20 // 4)
    assert peak_memory(torch.device("cpu")) >= max(before, 64) and held.sum() > 0
    assert peak_memory(torch.device("cpu")) == pytest.approx(before, abs=10_000)
