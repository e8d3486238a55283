"""A chat template as a running process: text in, text out, and an end to everything.

Templates are programs that came with a model. They loop, and they make texts; so they run where
both have limits (``template_process.py``), and what goes beyond them is an error like any other.
"""

import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

SCRIPT = Path(__file__).with_name("template_process.py")
SECONDS = 5.0  # of computing, for one chat
PATIENCE = 60.0  # until an answer, on however busy a machine
MEGABYTES = 1024
LETTERS = 2**26

Messages = Sequence[Mapping[str, Any]]
Cut = tuple[int, bool]


class TemplateError(ValueError):
    """A chat that a template does not render."""


class Template:
    """A chat template; its process is started at first use and ends with this object.

    May be used by several threads at once.

    Args:
      source: the template.
      variables: what it knows beside the messages, such as special tokens.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]):
        self._setting = {
            "template": source,
            "variables": dict(variables),
            "seconds": SECONDS,
            "megabytes": MEGABYTES,
            "letters": LETTERS,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._end: weakref.finalize[..., Any] | None = None
        self._lock = Lock()

    def render(self, messages: Messages, cuts: Sequence[Cut]) -> list[str | TemplateError]:
        """Render the beginnings of a chat.

        Args:
          messages: the chat.
          cuts: how many messages each beginning has, and whether it opens an assistant's turn.
        Returns: per beginning, the text or why there is none.
        """
        with self._lock:
            answers = json.loads(self._ask(json.dumps([messages, cuts]).encode() + b"\n"))
        return [TemplateError(a["error"]) if "error" in a else a["text"] for a in answers]

    def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()
        self._process = None

    def _ask(self, line: bytes) -> bytes:
        """A line of the process's output for one of its input.

        Raises: TemplateError if it does not come; the process has ended then.
        """
        try:
            process = self._started()
            assert process.stdin and process.stdout
            process.stdin.write(line)
            process.stdin.flush()
            return _line(process.stdout.fileno(), time.monotonic() + PATIENCE)
        except (OSError, TimeoutError) as error:
            self.close()
            raise TemplateError(f"the chat template stops its process: {error}") from error

    def _started(self) -> subprocess.Popen[bytes]:
        """The process, and its first line said."""
        if self._process is None or self._owner != os.getpid():  # a fork has one of its own
            process = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # what stops a run by Ctrl+C is not meant for it
            )
            self._process, self._owner = process, os.getpid()
            self._end = weakref.finalize(self, _finish, process, self._owner)
            assert process.stdin
            process.stdin.write(json.dumps(self._setting, default=str).encode() + b"\n")
        return self._process


def _line(descriptor: int, until: float) -> bytes:
    """Read a line.

    Raises: TimeoutError if it does not come in time; OSError if the other side is gone.
    """
    pieces: list[bytes] = []
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not (pieces and pieces[-1].endswith(b"\n")):
        if not poll.poll(max(until - time.monotonic(), 0) * 1000):
            raise TimeoutError(f"no answer in {PATIENCE:g} seconds")
        pieces.append(os.read(descriptor, 1 << 16))
        if not pieces[-1]:
            raise OSError("it is gone")
    return b"".join(pieces)


def _finish(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process and forget it; a fork of the one that started it only forgets it."""
    if owner == os.getpid():
        process.kill()
        process.wait()
    else:
        process.returncode = 0
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was written and never read
                pipe.close()
