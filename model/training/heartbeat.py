"""Ranks that wait long for each other know whether they still live.

Reading and writing weights may take long, so what waits for it has a long limit. A rank that has
gone or hangs ends that: each rank beats in the store at which all met, rank 0 looks after all
others and they after rank 0, which ends within seconds when any of them does.
"""

import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from model.training.report import tell_launcher, warn

BEAT_SECONDS = 5.0
SILENT_SECONDS = 3 * BEAT_SECONDS
POLL_SECONDS = 1.0
KEY = "vlshard/beat/{}"


class Heartbeat:
    """Beats as long as the process does; ends the process where it waits for one that does not."""

    def __init__(self, store: dist.Store, rank: int, ranks: int) -> None:
        """Begin to beat.

        Args:
          store: of all ranks; used by nothing else.
          rank: this one.
          ranks: how many there are.
        """
        store.set_timeout(timedelta(seconds=SILENT_SECONDS))
        self._store, self._rank, self._count = store, rank, 0
        self._others = range(1, ranks) if rank == 0 else range(1)
        self._waits: str | None = None
        self._heard: dict[int, tuple[bytes, float]] = {}
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    @contextmanager
    def watching(self, what: str) -> Generator[None]:
        """Look after the other ranks while this one waits for them.

        Args:
          what: is done, for the message.
        """
        self._heard, self._waits = {}, what
        try:
            yield
        finally:
            self._waits = None

    def _live(self) -> None:
        beat = 0.0
        while True:
            now, lost = time.monotonic(), None
            try:
                if now - beat >= BEAT_SECONDS:
                    beat, self._count = now, self._count + 1
                    self._store.set(KEY.format(self._rank), str(self._count))
                lost = self._silent(now) if self._waits else None
            except RuntimeError:  # whoever keeps the store has gone, or hangs
                lost = 0
            if lost is not None and (what := self._waits):
                _end(f"rank {lost} has not been heard of for {SILENT_SECONDS:.0f} s while {what}")
            time.sleep(POLL_SECONDS)

    def _silent(self, now: float) -> int | None:
        """A rank whose last beat is too long ago."""
        for rank in self._others:
            key = KEY.format(rank)
            beat = self._store.get(key) if self._store.check([key]) else b""
            before, since = self._heard.get(rank, (None, now))
            if beat != before:
                self._heard[rank] = (beat, now)
            elif now - since > SILENT_SECONDS:
                return rank
        return None


def _end(text: str) -> None:
    """End this process at once: it waits where nothing can wake it."""
    tell_launcher(text, 1)
    warn(f"error: {text}")
    os._exit(1)
