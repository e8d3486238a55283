"""The interrupt signal, noted so that all ranks can stop together after a step."""

import os
import signal
import time
from types import FrameType

INSIST_SECONDS = 5.0
INTERRUPTED = 130


class Interruption:
    """True once the process was interrupted."""

    def __init__(self) -> None:
        self._first: float | None = None

    def install(self) -> None:
        """Take over the signal; one that comes seconds after the first ends the process."""
        signal.signal(signal.SIGINT, self._note)

    def __bool__(self) -> bool:
        return self._first is not None

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        self._first = self._first or now
        if now - self._first > INSIST_SECONDS:
            os._exit(INTERRUPTED)
