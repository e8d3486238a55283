"""Signals that ask a run to stop: the first ends it after a step, the second at once.

A thread reads them, because Python's handlers wait for the main thread, which may wait for another
rank. What the first one asks for is agreed by all ranks, in what they exchange in each step anyway.
"""

import os
import select
import signal
import socket
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Protocol

from model.training.report import warn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 0.5  # a launcher may hand on what the terminal or scheduler has sent already
POLL_SECONDS = 1.0


class Others(Protocol):
    """The other ranks, as far as ends at once are told."""

    def end(self, status: int) -> None:
        """Tell them to end at once."""
        ...

    def ended(self) -> int | None:
        """The status to end with, if one of them has told this rank to."""
        ...


class Watch(Protocol):
    """Looks after the other ranks while this one waits long for them."""

    def watching(self, what: str) -> AbstractContextManager[None]:
        """Do so in a block in which something is done."""
        ...


class Interruption:
    """The first signal, noted; a second one ends the process and tells the other ranks."""

    def __init__(self) -> None:
        self.signal = 0
        self.others: Others | None = None
        self.watch: Watch | None = None
        self._first = 0.0

    def install(self) -> None:
        """Take over the signals; once a process, in its main thread."""
        here, there = socket.socketpair()
        there.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, _leave_to_thread)
        signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
        self._sockets = here, there  # kept open
        threading.Thread(target=self._watch, args=(here,), name="signals", daemon=True).start()

    def note(self, number: int) -> None:
        """Take a signal as it comes."""
        now = time.monotonic()
        if not self.signal:
            self.signal, self._first = number, now
            if int(os.environ.get("RANK", 0)) == 0:
                name = signal.Signals(number).name
                warn(f"{name}: stopping after this step; a second one ends at once, saving nothing")
        elif number != self.signal or now - self._first > ECHO_SECONDS:
            self._end()

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """A block in which this rank may wait long for others; one that has gone ends it.

        Args:
          what: was done in it, for the message.
        """
        return self.watch.watching(what) if self.watch else nullcontext()

    def ended_by_others(self) -> int | None:
        """The status to end with, if another rank was ended by its second signal."""
        if self.others is None:
            return None
        try:
            return self.others.ended()
        except Exception:  # whoever keeps the message has gone: there will be none
            self.others = None
            return None

    def _watch(self, here: socket.socket) -> None:
        """Read signals; look now and then whether another rank was ended."""
        while True:
            ready, _, _ = select.select([here], [], [], POLL_SECONDS)
            for number in here.recv(64) if ready else b"":
                if number in SIGNALS:
                    self.note(number)
            status = self.ended_by_others()
            if status is not None:
                os._exit(status)

    def _end(self) -> None:
        """End this process at once, and the other ranks soon."""
        status = status_of(self.signal)
        threading.Thread(target=self._tell_others, args=(status,), daemon=True).start()
        time.sleep(POLL_SECONDS / 2)  # enough to tell, and all that it may take
        os._exit(status)

    def _tell_others(self, status: int) -> None:
        if self.others is not None:
            self.others.end(status)


def status_of(number: int) -> int:
    """The exit status that stands for a signal, or 0 for none."""
    return 128 + number if number else 0


def _leave_to_thread(_number: int, _frame: FrameType | None) -> None:
    """The number is written to the thread's socket before this is called."""
