"""What a run says: progress on standard output, errors that all ranks share told once.

Nobody may be listening: a closed pipe or a full disk behind standard output ends no training.
"""

import contextlib
import json
import os
import sys
import time
from typing import TextIO

REPORT_SECONDS = 1.0
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun shows its message in the report at its end


def say(text: str, stream: TextIO | None = None) -> bool:
    """Write a line at once; nothing where there is no standard output to write to.

    Args:
      text: the line.
      stream: None is standard output.
    Returns: whether it was written; if not, the stream takes all that follows to nowhere.
    """
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        silence(stream)
        return False
    return True


def warn(text: str) -> None:
    """Write a line to standard error."""
    say(text, sys.stderr)


def silence(stream: TextIO) -> None:
    """Send a stream nowhere, with what lies in its buffer, so that no later write to it fails."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def tell(error: Exception, *, speak: bool = True) -> int:
    """Tell an error that every rank has; the exit status to end with.

    Rank 0 speaks; the others leave it the time to, since the first exit ends all ranks.

    Args:
      error: the same on every rank.
      speak: whether rank 0 writes it to standard error; else whoever started the ranks does.
    """
    tell_launcher(str(error), status=1)
    if not speak:
        return 1
    if int(os.environ.get("RANK", 0)) == 0:
        warn(f"error: {error}")
    else:
        time.sleep(REPORT_SECONDS)
    return 1


def tell_launcher(text: str, status: int) -> None:
    """Give whoever started the ranks what this one ends for, to be the last on the screen.

    Args:
      text: what has happened.
      status: that the rank ends with.
    """
    if os.environ.get(ERROR_FILE):
        with contextlib.suppress(OSError), open(os.environ[ERROR_FILE], "w") as file:
            json.dump({"message": text, "status": status, "time": time.time()}, file)
