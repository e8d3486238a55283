"""Renders a chat template in a process of its own, within limits of time and memory.

Run as a script by ``template.py``; imports nothing of the project. Its first line of input says the
template and what is known to it, each further one a chat and which beginnings of it to render; it
answers a line a line.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

NONE = {"tools": None, "documents": None}


class OutOfTime(BaseException):
    """The limit of time for one line of input is over."""


class Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``: it marks what assistants say and renders as its content."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> Any:
        """Give a call of a macro that is the block's content, as transformers does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_content")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class Namespace(jinja2.utils.Namespace):
    """A template's variables, none of which may be private."""

    def __init__(*args: Any, **attributes: Any):
        if any(str(name).startswith("_") for name in attributes):
            raise jinja2.exceptions.SecurityError("names must not begin with an underscore")
        jinja2.utils.Namespace.__init__(*args, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError("names must not begin with an underscore")
        super().__setitem__(name, value)


def environment() -> ImmutableSandboxedEnvironment:
    """What templates are made for: transformers 5.24, utils.chat_template_utils."""

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    found.globals["namespace"] = Namespace
    return found


class Renderer:
    """The template, compiled at its first chat, so that what is wrong with it is an answer too."""

    def __init__(self, given: dict[str, Any]):
        self._source, self._variables, self._most = (
            given[key] for key in ("template", "variables", "letters")
        )
        self._template: jinja2.Template | None = None

    def render(self, messages: Any, prompt: bool) -> str:
        """The text of a chat.

        Args:
          messages: the chat.
          prompt: whether to open an assistant's turn at its end.
        Raises: TemplateError if it has more letters than it may, and whatever templates raise.
        """
        if self._template is None:
            self._template = environment().from_string(self._source)
        chat = {"messages": messages, "add_generation_prompt": prompt}
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(self._variables | chat | NONE):
            pieces.append(piece)
            size += len(piece)
            if size > self._most:
                most = f"it writes more than {self._most:,} characters"
                raise jinja2.exceptions.TemplateError(most)
        return "".join(pieces)


def answer(render: Callable[[], str], limits: dict[str, Any]) -> dict[str, str]:
    """A text, or an error, of one chat."""
    try:
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
        try:
            return {"text": render()}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except OutOfTime:
        return {"error": f"it takes more than {limits['seconds']:g} seconds", "late": ""}
    except MemoryError:
        return {"error": f"it takes more than {limits['megabytes']:,} MiB of memory"}
    except RecursionError:
        return {"error": "it calls itself without an end"}
    except Exception as error:  # templates raise what they like, on purpose and by accident
        return {"error": f"{error}"[:1000] or type(error).__name__}


def stop(*_: object) -> None:
    """Handle the timer's signal."""
    raise OutOfTime


def serve(given: dict[str, Any]) -> None:
    """Answer line after line of the input; what comes after a chat without an end fails as it did.

    Args:
      given: the first line: template, variables and limits.
    """
    renderer = Renderer(given)
    for line in sys.stdin:
        answers: list[dict[str, str]] = []
        messages, cuts = json.loads(line)
        for count, prompt in cuts:
            late = bool(answers) and "late" in answers[-1]
            render = partial(renderer.render, messages[:count], prompt)
            answers.append(answers[-1] if late else answer(render, given))
        sys.stdout.write(json.dumps(answers) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Set the limits, then serve until the input ends."""
    given = json.loads(sys.stdin.readline())
    most = given["megabytes"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, stop)
    serve(given)


if __name__ == "__main__":
    main()
