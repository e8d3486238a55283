"""Chats to token ids: a model folder's chat template, and what of a chat is learned."""

import json
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from model.config import Config
from model.data.sample import IGNORED, Sample
from vlshard.plan import Grid

MARK = "<image>"
ROLES = ("system", "user", "assistant", "tool")


class ChatError(ValueError):
    """A chat that the template or the tokenizer cannot make a sample of."""


class ChatTemplate:
    """The tokenizer of a model folder, with its chat template; loaded at first use.

    Args:
      folder: Hugging Face model folder.
      config: config of the model, for its placeholder.
    """

    def __init__(self, folder: str | Path, config: Config):
        self.folder = Path(folder)
        self.config = config
        self._tokenizer: Any = None
        self._lock = Lock()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer.

        Raises: ChatError if the folder has none, or no chat template, or no end-of-turn token.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _load_tokenizer(self.folder)
            return self._tokenizer

    def sample(self, messages: Any, grids: tuple[Grid, ...]) -> Sample:
        """Make a sample of a chat.

        Args:
          messages: the chat, a list of {"role", "content"}; ``<image>`` marks each image.
          grids: of the chat's images, in reading order.
        Returns: ids with a placeholder per visual token; labels are the ids of what assistants
          say and of the token that ends their turn, without placeholders, and -100 elsewhere.
        Raises: ChatError if the chat is malformed, marks unlike images, the template does not
          render whole turns one after another, or nothing is left to learn.
        """
        _check_messages(messages, len(grids))
        text, spans = self._render(messages)
        encoded = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoded.ids, dtype=np.int64)
        starts, stops = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2).T
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

    def _render(self, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
        """Text of a chat, and the character spans of it that are learned."""
        turns = [_with_parts(message) for message in messages]
        text = self._apply(turns)
        end = self.tokenizer.eos_token
        spans = []
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            before = self._apply(turns[:i], add_generation_prompt=True)
            through = self._apply(turns[: i + 1]) if i + 1 < len(turns) else text
            if not (through.startswith(before) and text.startswith(through)):
                raise ChatError(
                    f"the chat template renders messages 0 to {i} otherwise alone than in the "
                    "whole chat, so what the assistant says there cannot be told apart"
                )
            stop = through.rfind(end, len(before))
            if stop < 0:
                raise ChatError(
                    f"the chat template does not end message {i} with the end-of-turn token {end!r}"
                )
            spans.append((len(before), stop + len(end)))
        return text, spans

    def _apply(self, turns: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """Render messages with the chat template."""
        tokenizer = self.tokenizer
        try:
            return tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # templates raise what they like, on purpose and by accident
            raise ChatError(f"the chat template refuses the messages: {error}") from error


def _check_messages(messages: Any, num_images: int) -> None:
    """Raise ChatError unless messages are a chat with as many marks as images."""
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages: expected a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            found = list(message) if isinstance(message, dict) else json.dumps(message)
            raise ChatError(f"message {i}: found {found}, expected the keys role and content")
        if message["role"] not in ROLES:
            role = json.dumps(message["role"])
            raise ChatError(f"message {i}: found role {role}, expected one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise ChatError(f"message {i}: expected the content as text with {MARK} for images")
        if any("\ud800" <= letter <= "\udfff" for letter in message["content"]):
            raise ChatError(f"message {i}: the content is no text, it has half a surrogate pair")
    marks = sum(message["content"].count(MARK) for message in messages)
    if marks != num_images:
        raise ChatError(f"found {marks} {MARK} marks for {num_images} images, expected as many")


def _with_parts(message: dict[str, str]) -> dict[str, Any]:
    """A message as templates take it: content with images becomes a list of parts."""
    first, *rest = message["content"].split(MARK)
    if not rest:
        return message
    parts = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    kept = [part for part in parts if part.get("text") != ""]
    return {"role": message["role"], "content": kept}


def _load_tokenizer(folder: Path) -> Any:
    """Load a folder's tokenizer and make sure that chats can be rendered with it."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever missing or foreign files lead to
        raise ChatError(f"the tokenizer of {folder} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ChatError(f"the tokenizer of {folder} has no tokenizer.json")
    beside = folder / "chat_template.json"  # where older processors keep it
    if tokenizer.chat_template is None and beside.is_file():
        try:
            tokenizer.chat_template = json.loads(beside.read_text(encoding="utf-8"))[
                "chat_template"
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ChatError(f"{beside} holds no chat template") from error
    if tokenizer.chat_template is None:
        raise ChatError(f"{folder} has no chat template, and the data has chat rows")
    if tokenizer.eos_token is None:
        raise ChatError(f"the tokenizer of {folder} names no eos_token, which ends a turn")
    return tokenizer
