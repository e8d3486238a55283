"""Chats to token ids: a model folder's chat template, and what of a chat is learned."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from model.config import Config, json_text, odd_file, read_json
from model.data.control import Alphabet, ControlError, Controls
from model.data.sample import IGNORED, Sample
from model.data.template import Cut, Template, TemplateError
from vlshard.language import clipped
from vlshard.plan import Grid

MARK = "<image>"
MARKS = re.compile(r"(\\*)(<image>|<video>)")
SURROGATE = re.compile("[\ud800-\udfff]")
ROLES = ("system", "user", "assistant", "tool")
SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", SETTINGS, "chat_template.jinja", "chat_template.json")

Turn = dict[str, Any]
Span = tuple[int, int]


class ChatError(ValueError):
    """A chat that the template or the tokenizer cannot make a sample of."""


@dataclass(frozen=True)
class Tools:
    """What a model folder has for chats: its tokenizer's control tokens and its chat template."""

    controls: Controls
    template: Template


class ChatTemplate:
    """The tokenizer of a model folder, with its chat template; loaded at first use.

    Args:
      folder: Hugging Face model folder.
      config: config of the model, for its placeholder.
    """

    def __init__(self, folder: str | Path, config: Config):
        self.folder = Path(folder)
        self.config = config
        self._tools: Tools | None = None
        self._lock = Lock()

    @property
    def tools(self) -> Tools:
        """The tokenizer and the template.

        Raises: ChatError if the folder has none, or no chat template, or no end-of-turn token.
        """
        with self._lock:
            if self._tools is None:
                self._tools = _load_tools(self.folder, self.config)
            return self._tools

    def sample(self, messages: Any, grids: tuple[Grid, ...]) -> Sample:
        r"""Make a sample of a chat.

        Args:
          messages: the chat, a list of {"role", "content"}; ``<image>`` marks each image, and
            ``\<image>`` is the text ``<image>``.
          grids: of the chat's images, in reading order.
        Returns: ids with a placeholder per visual token; labels are the ids of what assistants
          say and of the token that ends their turn, without placeholders, and -100 elsewhere.
          What is spelt like a control token in a message is ordinary text.
        Raises: ChatError if the chat is malformed, marks unlike images, the template does not
          render it in a way that tells what assistants say, or nothing is left to learn.
        """
        _check_messages(messages)
        contents = [split_content(i, message["content"]) for i, message in enumerate(messages)]
        _check_marks(contents, len(grids))
        try:
            alphabet = self.tools.controls.alphabet(message["content"] for message in messages)
            roles = [message["role"] for message in messages]
            chat = Chat(self.tools.template, alphabet, roles, contents)
            text, spans = chat.rendered()
            ids, starts, stops = alphabet.encode(text)
        except (ControlError, TemplateError) as error:
            raise ChatError(str(error)) from error
        placeholders = ids == self.config.image_token_id
        learned = np.zeros(len(ids), dtype=bool)
        for start, stop in spans:
            learned |= (starts >= start) & (stops <= stop)
        learned &= ~placeholders
        if not learned.any():
            raise ChatError("nothing to learn: found no assistant turn, expected at least one")
        if placeholders.sum() != len(grids):
            raise ChatError(
                f"the chat template wrote {placeholders.sum()} image placeholders (token "
                f"{self.config.image_token_id}), expected {len(grids)}, one an image"
            )
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[placeholders] = [t * h * w // self.config.unit for t, h, w in grids]
        labels = np.where(learned, ids, IGNORED)
        return Sample(np.repeat(ids, repeats), np.repeat(labels, repeats), grids)

    def text(self, ids: Iterable[int]) -> str | None:
        """Tokens as they read, control tokens included; None if the folder has no tokenizer."""
        try:
            return self.tools.controls.text(ids)
        except ChatError:
            return None


class Chat:
    """One chat before its template.

    Args:
      template: renders it.
      alphabet: letters for control tokens.
      roles: of the messages.
      contents: of the messages: pieces of text, with an image between each two.
    """

    def __init__(
        self, template: Template, alphabet: Alphabet, roles: list[str], contents: list[list[str]]
    ):
        self._template, self._alphabet = template, alphabet
        self._turns = [
            {"role": role, "content": _parts([alphabet.marked(text) for text in content])}
            for role, content in zip(roles, contents, strict=True)
        ]

    def rendered(self) -> tuple[str, list[Span]]:
        """The chat as the template renders it, and which characters of it are learned.

        Raises: TemplateError or ChatError if that cannot be told.
        """
        turns = self._turns
        places = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        cuts: list[Cut] = [(len(turns), False)]
        for i in places:
            cuts += [(i, True), *([(i + 1, False)] if i + 1 < len(turns) else [])]
        text, *parts = self._render(turns, cuts)
        if isinstance(text, TemplateError):
            raise ChatError(f"the chat template refuses the messages: {clipped(text)}") from text
        parts += [text] * (2 * len(places) - len(parts))  # through the last message
        pairs = zip(places, parts[::2], parts[1::2], strict=True)
        return text, [self._span(text, i, before, through) for i, before, through in pairs]

    def _render(self, turns: list[Turn], cuts: list[Cut]) -> list[str | TemplateError]:
        """Respelt beginnings of a chat."""
        found = self._template.render(turns, cuts)
        return [x if isinstance(x, TemplateError) else self._alphabet.respelt(x) for x in found]

    def _span(
        self, text: str, i: int, before: str | TemplateError, through: str | TemplateError
    ) -> Span:
        """What is learned of one turn.

        Args:
          text: the whole chat.
          i: number of the message.
          before: the messages before it, and what opens an assistant's turn.
          through: the messages up to it.
        """
        if not (isinstance(before, str) and isinstance(through, str)):
            return self._span_by_content(text, i)
        if not (through.startswith(before) and text.startswith(through)):
            return self._span_by_content(text, i)
        stop = through.rfind(self._alphabet.end, len(before))
        if stop < 0:
            raise ChatError(self._no_end(i))
        return len(before), stop + 1

    def _span_by_content(self, text: str, i: int) -> Span:
        """What is learned of a turn that is rendered otherwise in the whole chat than at its end.

        So it is where a template drops the reasoning of earlier turns, or needs a first message.
        The turn's place is found by rendering the whole chat with another content in it.
        """
        probe, end = self._alphabet.probe, self._alphabet.end
        other = {"role": "assistant", "content": probe}
        ask = {"role": "user", "content": probe}
        turns = [*self._turns[:i], other, *self._turns[i + 1 :]]
        found = self._render(turns, [(len(turns), False)])
        found += self._render([ask, other], [(1, False), (1, True), (2, False)])
        whole, asked, opened, closed = ("" if isinstance(x, TemplateError) else x for x in found)
        closing = closed[closed.rfind(probe) + 1 :] if probe in closed else ""
        closing = closing[: closing.find(end) + 1]
        opening = opened[len(asked) :] if asked and opened.startswith(asked) else ""
        if whole.count(probe) != 1:
            raise ChatError(self._otherwise(i))
        at = whole.index(probe)
        start = at
        opens = whole.rfind(opening, 0, at) + len(opening) if opening in whole[:at] else -1
        if 0 <= opens and end not in whole[opens:at] and text.startswith(whole[:opens]):
            start = opens
        rest = whole[at + 1 :]
        stop = len(text) - len(rest)
        if not (text.startswith(whole[:start]) and text.endswith(rest) and start <= stop):
            raise ChatError(self._otherwise(i))
        if not (closing and rest.startswith(closing)):
            raise ChatError(self._no_end(i))
        return start, stop + len(closing)

    def _no_end(self, i: int) -> str:
        """Message: where a turn ends is not told."""
        end = self._alphabet.spelt(self._alphabet.end)
        return f"the chat template does not end message {i} with the end-of-turn token {end!r}"

    def _otherwise(self, i: int) -> str:
        """Message: a turn is not found again in the whole chat."""
        return (
            f"the chat template renders messages 0 to {i} otherwise alone than in the "
            "whole chat, so what the assistant says there cannot be told apart"
        )


def split_content(i: int, content: str) -> list[str]:
    """Pieces of a message's text, with an image between each two.

    A mark with a backslash before it is text. Before a mark, two backslashes are one.

    Args:
      i: number of the message.
      content: of the message.
    Raises: ChatError if it marks a video.
    """
    pieces, last = [""], 0
    for found in MARKS.finditer(content):
        slashes, mark = found.groups()
        pieces[-1] += content[last : found.start()] + "\\" * (len(slashes) // 2)
        last = found.end()
        if len(slashes) % 2:
            pieces[-1] += mark
        elif mark == MARK:
            pieces.append("")
        else:
            raise ChatError(
                f"message {i}: found {mark}, but videos are not read from files; where the text "
                f"itself is meant, write \\{mark}"
            )
    pieces[-1] += content[last:]
    return pieces


def _check_messages(messages: Any) -> None:
    """Raise ChatError unless messages are a chat."""
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages: expected a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            found = clipped(list(message)) if isinstance(message, dict) else json_text(message)
            raise ChatError(f"message {i}: found {found}, expected the keys role and content")
        if message["role"] not in ROLES:
            role = json_text(message["role"])
            raise ChatError(f"message {i}: found role {role}, expected one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise ChatError(f"message {i}: expected the content as text with {MARK} for images")
        if SURROGATE.search(message["content"]):
            raise ChatError(f"message {i}: the content is no text, it has half a surrogate pair")


def _check_marks(contents: list[list[str]], num_images: int) -> None:
    """Raise ChatError unless messages have as many marks as there are images."""
    marks = [len(content) - 1 for content in contents]
    if sum(marks) == num_images:
        return
    places = [f"message {i} has {count}" for i, count in enumerate(marks) if count]
    told = f" ({clipped(', '.join(places))})" if places else ""
    hint = f"; where the text itself is meant, write \\{MARK}" if sum(marks) > num_images else ""
    raise ChatError(
        f"found {sum(marks)} {MARK} marks for {num_images} images, expected as many{told}{hint}"
    )


def _parts(pieces: list[str]) -> str | list[Turn]:
    """A message's content as templates take it: a text, or parts if it has images."""
    first, *rest = pieces
    if not rest:
        return first
    parts: list[Turn] = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


def _load_tools(folder: Path, config: Config) -> Tools:
    """Load a folder's tokenizer and template, and make sure that they serve for chats."""
    for name in TOKENIZER_FILES:
        _check_file(folder / name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever missing or foreign files lead to
        reason = clipped(error)
        raise ChatError(f"the tokenizer of {folder} cannot be loaded: {reason}") from error
    if not tokenizer.is_fast:
        raise ChatError(f"the tokenizer of {folder} has no tokenizer.json")
    _find_template(tokenizer, folder)
    if tokenizer.eos_token is None:
        raise ChatError(f"the tokenizer of {folder} names no eos_token, which ends a turn")
    try:
        source = tokenizer.get_chat_template()
    except ValueError as error:
        raise ChatError(f"the chat templates of {folder}: {clipped(error)}") from error
    visual = (
        config.image_token_id,
        config.video_token_id,
        config.vision_start_token_id,
        config.vision_end_token_id,
    )
    return Tools(Controls(tokenizer, visual), Template(source, tokenizer.special_tokens_map))


def _check_file(path: Path) -> None:
    """Raise ChatError where something else is in place of a file, or settings have a key twice."""
    try:
        if path.name == SETTINGS and path.exists():
            read_json(path)
        odd = odd_file(path) if path.exists() else None
    except (OSError, ValueError, RecursionError) as error:
        odd = clipped(error)
    if odd is not None:
        raise ChatError(f"{path}: {odd}")


def _find_template(tokenizer: Any, folder: Path) -> None:
    """Give a tokenizer the template that lies beside it, where older processors keep it."""
    beside = folder / "chat_template.json"
    if tokenizer.chat_template is None and beside.is_file():
        try:
            tokenizer.chat_template = json.loads(beside.read_text(encoding="utf-8"))[
                "chat_template"
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ChatError(f"{beside} holds no chat template") from error
    if tokenizer.chat_template is None:
        raise ChatError(f"{folder} has no chat template, and the data has chat rows")
