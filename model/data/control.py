"""Control tokens of a tokenizer, kept apart from prose that is spelt like them.

What marks turns and images has a spelling, such as ``<|im_end|>``, that anybody can write. Prose
that does is marked before a chat is rendered; in the rendered text the control tokens without a
mark, which only the template can have written, become letters that nobody writes; and a copy of the
tokenizer knows control tokens by these letters alone. To it, everything else is ordinary text.
"""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from vlshard.language import IntArray

FIRST, LAST = 0x100000, 0x10FFFD  # letters of Unicode's last private plane


class ControlError(ValueError):
    """Text that a tokenizer turns into a control token of its own accord."""


class Controls:
    """A tokenizer's control tokens: its special ones, its end of turn, the model's visual ones.

    Args:
      tokenizer: as transformers loads it, with a tokenizer.json.
      ids: of tokens that are control tokens even if the tokenizer does not call them special.
    """

    def __init__(self, tokenizer: Any, ids: Iterable[int]):
        chosen = {*ids, tokenizer.eos_token_id}
        added = sorted(tokenizer.added_tokens_decoder.items())
        self.tokens = {i: token for i, token in added if token.special or i in chosen}
        self.end = tokenizer.eos_token_id
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        reserved = {*chosen, *self.tokens} - {tokenizer.unk_token_id}  # text may be unknown
        self._reserved = np.array(sorted(reserved), dtype=np.int64)
        self._alphabets: dict[int, Alphabet] = {}

    def alphabet(self, texts: Iterable[str]) -> "Alphabet":
        """Letters for the control tokens that occur in none of some texts."""
        width = len(self.tokens) + 2
        chosen = [text for text in texts if re.search(f"[{chr(FIRST)}-{chr(LAST)}]", text)]
        for first in range(FIRST, LAST - width, width):
            if not any(re.search(f"[{chr(first)}-{chr(first + width)}]", text) for text in chosen):
                if first not in self._alphabets:
                    self._alphabets[first] = Alphabet(self, first)
                return self._alphabets[first]
        raise ControlError("the chat uses every letter of Unicode's last private plane")

    def text(self, ids: Iterable[int]) -> str:
        """What tokens stand for, control tokens as they are spelt."""
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=False)

    def twin(self, letters: dict[int, str]) -> Tokenizer:
        """A copy of the tokenizer that reads control tokens from letters, and from nothing else."""
        state = json.loads(self._backend.to_str())
        for entry in state["added_tokens"]:
            entry["special"] = entry["special"] or entry["id"] in self.tokens
        twin = Tokenizer.from_str(json.dumps(state))
        twin.no_truncation()
        twin.no_padding()
        twin.encode_special_tokens = True
        for i, token in self.tokens.items():
            spaces = {"lstrip": token.lstrip, "rstrip": token.rstrip}
            twin.add_tokens(
                [AddedToken(letters[i], normalized=token.normalized, special=False, **spaces)]
            )
        return twin

    def refuse(self, ids: IntArray) -> None:
        """Raise ControlError if ids, read by a twin, have a control token in them all the same."""
        for i in np.intersect1d(ids, self._reserved).tolist():
            name = self._backend.id_to_token(i)
            raise ControlError(f"the tokenizer makes its control token {name!r} of ordinary text")


class Alphabet:
    """One letter a control token, and a mark for prose.

    Args:
      controls: the control tokens.
      first: the first of the letters, as a number; the mark.
    """

    def __init__(self, controls: Controls, first: int):
        self._controls = controls
        self.mark, self.probe = chr(first), chr(first + 1)
        self.letters = {i: chr(first + 2 + k) for k, i in enumerate(controls.tokens)}
        self.end = self.letters[controls.end]
        self._letter = re.compile(f"[{''.join(self.letters.values())}]")
        self._by_text = {t.content: self.letters[i] for i, t in controls.tokens.items()}
        spelt = "|".join(map(re.escape, sorted(self._by_text, key=len, reverse=True)))
        self._spelt = re.compile(spelt)
        self._rendered = re.compile(f"{self.mark}?({spelt})|{self.mark}")
        self._escaped = tuple(write(self.mark)[1:-1] for write in (repr, json.dumps))
        self._begun = {text[:k] for text in self._by_text for k in range(1, len(text))}

    def marked(self, prose: str) -> str:
        """Prose with a mark before what is spelt like a control token, or at its end begins so."""
        prose = self._spelt.sub(lambda found: self.mark + found[0], prose)
        longest = max(map(len, self._begun), default=0)
        for k in range(min(longest, len(prose)), 0, -1):
            if prose[-k:] in self._begun:
                return f"{prose[:-k]}{self.mark}{prose[-k:]}"
        return prose

    def respelt(self, rendered: str) -> str:
        """Rendered text with letters for the template's control tokens, and without marks.

        Raises: ControlError if marks cannot be told because the template wrote prose as code.
        """
        if any(escaped in rendered for escaped in self._escaped):
            raise ControlError(
                "the chat template writes as code what messages spell like control tokens"
            )

        def letter(found: re.Match[str]) -> str:
            text = found[1]
            return "" if text is None else text if found[0] != text else self._by_text[text]

        return self._rendered.sub(letter, rendered)

    def spelt(self, text: str) -> str:
        """Respelt text as it is read by people."""
        names = {letter: self._controls.tokens[i].content for i, letter in self.letters.items()}
        return text.translate(str.maketrans(names))

    @cached_property
    def _twin(self) -> tuple[Tokenizer, IntArray, IntArray]:
        """The tokenizer's copy, the ids that it gives letters (sorted), and their true ones."""
        twin = self._controls.twin(self.letters)
        pairs = sorted((twin.token_to_id(letter), i) for i, letter in self.letters.items())
        theirs, true = np.array(pairs, dtype=np.int64).T
        return twin, theirs, true

    def encode(self, text: str) -> tuple[IntArray, IntArray, IntArray]:
        """Tokens of respelt text.

        Returns: ids, and where in the text each starts and stops.
        Raises: ControlError if ordinary text becomes a control token, or a control token text.
        """
        twin, theirs, true = self._twin
        encoded = twin.encode(text, add_special_tokens=False)
        ids = np.array(encoded.ids, dtype=np.int64)
        self._controls.refuse(ids)
        at = np.minimum(np.searchsorted(theirs, ids), len(theirs) - 1)
        found = theirs[at] == ids
        if found.sum() != len(self._letter.findall(text)):
            raise ControlError("the tokenizer does not find all control tokens that it should")
        starts, stops = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2).T
        return np.where(found, true[at], ids), starts, stops
