"""Reads the spec language, with a message and carets for each way to get it wrong."""

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn, TypeVar

from vlshard.language.errors import Span, SpecError, nearest
from vlshard.language.syntax import (
    ORDERS,
    Axis,
    Dim,
    Dots,
    Group,
    Int,
    Item,
    Name,
    Spec,
    Split,
    label,
    names_in,
)

PLACES = {
    "zigzag": "a plain dim, or the inner name of a packed one: 's@cp.zigzag', '(img s@cp.zigzag)'",
    "balance": "the first name of a packed dim: '(img@cp.balance s)'",
    "home": "the first name of a packed dim or a plain batch dim: '(img@dp.home s)', 'b@dp.home'",
}
DEEPEST = 8
TOKEN = re.compile(r"\s+|(?P<word>\w+)|(?P<mark>\.\.\.|->|[@+.()])|(?P<bad>.)", re.ASCII)
K = TypeVar("K", bound=Hashable)


class Token(NamedTuple):
    """A word or a mark; the last token of a text is empty."""

    text: str
    span: Span


class Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.tokens: list[Token] = []
        for match in TOKEN.finditer(text):
            span = Span(*match.span())
            if match["bad"]:
                note = "dims and axes stand apart by blanks" if match.group() == "," else None
                self.fail(f"unexpected character {match.group()!r}", span, note=note)
            if match["word"] or match["mark"]:
                self.tokens.append(Token(match.group(), span))
        self.tokens.append(Token("", Span(len(text), len(text))))

    def peek(self) -> Token:
        """The token to be read next."""
        return self.tokens[self.at]

    def next(self) -> Token:
        """Take a token."""
        self.at += 1
        return self.tokens[self.at - 1]

    def here(self) -> Span:
        """The characters to point at if the next token is wrong: the last ones at the end."""
        return self.peek().span if self.peek().text else self.tokens[max(self.at - 1, 0)].span

    def since(self, start: int) -> Span:
        """The characters from ``start`` to the end of the token taken last."""
        return Span(start, self.tokens[self.at - 1].span.stop)

    def fail(self, headline: str, *spans: Span, note: str | None = None) -> NoReturn:
        """Raise an error with carets under the spans."""
        raise SpecError(headline, text=self.text, spans=spans, notes=[note] if note else [])

    def spec(self) -> Spec:
        """``dim* ["+" axes+]``, up to an arrow, the end or what fits nowhere."""
        dims: list[Dim] = []
        while self.peek().text not in ("", "+", "->"):
            dims.append(self.dim())
        pending: list[Axis] = []
        if self.peek().text == "+":
            plus = self.next()
            while self.peek().text not in ("", "->"):
                pending += self.axes("'+'", plus.span)[0]
            if not pending:
                self.fail("'+' needs the axes over which a sum is pending", plus.span)
        result = Spec(self.text, tuple(dims), tuple(pending))
        self.check_once(result)
        return result

    def dim(self) -> Dim:
        """``item | "..." | INT`` at the top level."""
        if self.peek().text == "...":
            dots = Dots(self.next().span)
            self.refuse_split("'...' cannot be split; name the dim", dots.span)
            return dots
        item = self.item(depth=0)
        if isinstance(item, Name):
            self.check_orders(item, ("zigzag", "home"))
        return item

    def item(self, depth: int) -> Item:
        """A name, an integer or a group, with its splits."""
        token = self.peek()
        if token.text == "(":
            return self.group(depth + 1)
        if token.text.isdigit():
            return self.integer()
        if not token.text.isidentifier():
            if token.text and token.text[0].isdigit():
                self.fail(f"'{token.text}': a name cannot start with a digit", token.span)
            self.fail(f"unexpected '{token.text}'; a dim was expected", token.span)
        if token.text == "where":
            note = "layout and reshard take where= for the place that messages name"
            self.fail("a dim cannot be named 'where'", token.span, note=note)
        self.next()
        return Name(token.text, self.splits(), self.since(token.span.start))

    def integer(self) -> Int:
        """A size."""
        token = self.next()
        if len(token.text) > 18 or int(token.text) < 1:
            self.fail(f"a size is at least 1 and has at most 18 digits: {token.text}", token.span)
        self.refuse_split(f"the size {token.text} cannot be split; name the dim", token.span)
        return Int(int(token.text), token.span)

    def group(self, depth: int) -> Group:
        """``"(" (item | INT)+ ")" split*``, with the orders that its names may have."""
        opening = self.next()
        if depth > DEEPEST:
            self.fail(f"more than {DEEPEST} brackets inside each other", opening.span)
        items: list[Item] = []
        while self.peek().text != ")":
            if self.peek().text == "+" and ")" in (token.text for token in self.tokens[self.at :]):
                headline = "a sum is pending over the whole tensor: '+' comes behind all dims"
                self.fail(headline, self.peek().span)
            if self.peek().text in ("", "->", "+"):
                self.fail("this bracket is never closed", opening.span)
            item = self.item(depth)
            if isinstance(item, Name):
                first = ("balance", "home") if not items else ("zigzag",)
                self.check_orders(item, first if depth == 1 else ())
            items.append(item)
        self.next()
        if not items:
            self.fail("a bracket needs dims inside", self.since(opening.span.start))
        group = Group(tuple(items), self.splits(), self.since(opening.span.start))
        self.check_orders(group, ())
        return group

    def splits(self) -> tuple[Split, ...]:
        """``split*``, that is ``"@" axes ["." order]`` each."""
        result: list[Split] = []
        while self.peek().text == "@":
            at = self.next()
            axes, order = self.axes("'@'", at.span)
            result.append(Split(axes, order, self.since(at.span.start)))
        return tuple(result)

    def axes(self, owner: str, owner_span: Span) -> tuple[tuple[Axis, ...], str | None]:
        """``axes ["." order]``; an order is taken only after ``@``."""
        if self.peek().text != "(":
            axis, order = self.axis(owner, owner_span, ordered=owner == "'@'")
            return (axis,), order
        opening = self.next()
        axes: list[Axis] = []
        while self.peek().text != ")":
            if not self.peek().text:
                self.fail("this bracket is never closed", opening.span)
            axes.append(self.axis("'('", opening.span, ordered=False)[0])
        self.next()
        if not axes:
            self.fail("a bracket needs axes inside", self.since(opening.span.start))
        if owner != "'@'" or self.peek().text != ".":
            return tuple(axes), None
        order = self.suffix()
        if order.text not in ORDERS:
            known = "orders are .zigzag, .balance and .home" + nearest(order.text, ORDERS)
            self.fail(f"unknown order '.{order.text}'", order.span, note=known)
        return tuple(axes), order.text

    def axis(self, owner: str, owner_span: Span, *, ordered: bool) -> tuple[Axis, str | None]:
        """``NAME ["." PART]`` and, where allowed, ``["." order]``."""
        token = self.peek()
        if not token.text:
            self.fail(f"{owner} needs a mesh axis after it", owner_span)
        if not token.text.isidentifier():
            self.fail(f"a mesh axis was expected after {owner}, got '{token.text}'", token.span)
        self.next()
        words: list[Token] = []
        while self.peek().text == "." and len(words) < 2:
            words.append(self.suffix())
        order = words.pop().text if ordered and words and words[-1].text in ORDERS else None
        if order and words and words[-1].text in ORDERS:
            self.fail("a split has one order", words[-1].span)
        for word in words:
            if word.text in ORDERS:
                self.fail(
                    f"'{word.text}' is an order, and no part of an axis can be named like one",
                    word.span,
                    note="an order comes last in a split: '@cp.zigzag', '@(dp cp).home'",
                )
        if len(words) > 1:
            note = "orders are .zigzag, .balance and .home" + nearest(words[1].text, ORDERS)
            self.fail(f"unknown order '.{words[1].text}'", words[1].span, note=note)
        part = words[0].text if words else None
        stop = words[0].span.stop if words else token.span.stop
        return Axis(token.text, part, Span(token.span.start, stop)), order

    def suffix(self) -> Token:
        """``"."`` and the word behind it, without blanks."""
        owner, dot, word = self.tokens[self.at - 1], self.next(), self.peek()
        if not (word.text.isdigit() or word.text.isidentifier()):
            self.fail("'.' needs a part of an axis or an order after it", dot.span)
        if owner.span.stop < dot.span.start or dot.span.stop < word.span.start:
            self.fail("no blanks around '.'", Span(owner.span.stop - 1, word.span.start + 1))
        return self.next()

    def refuse_split(self, headline: str, span: Span) -> None:
        """What came last takes no split."""
        if self.peek().text == "@":
            self.fail(headline, Span(span.start, self.next().span.stop))

    def check_orders(self, dim: Name | Group, allowed: Sequence[str]) -> None:
        """The orders of a dim's splits are ones that its place allows, ``.home`` once."""
        homes = [split.order_span for split in dim.splits if split.order == "home"]
        for split in dim.splits:
            if split.order and split.order not in allowed:
                note = f"it goes on {PLACES[split.order]}"
                self.fail(
                    f"'.{split.order}' cannot stand on '{label(dim)}'", split.order_span, note=note
                )
        if len(homes) > 1:
            self.fail(f"'.home' twice on '{label(dim)}'", *homes)

    def check_once(self, result: Spec) -> None:
        """No dim name, no axis and only one ``...`` occurs twice."""
        names = [(n.name, n.name_span) for dim in result.dims for n in names_in(dim)]
        names += [("...", dim.span) for dim in result.dims if isinstance(dim, Dots)]
        for name, spans in repeated(names).items():
            self.fail(f"dim '{name}' occurs twice", *spans)
        whole = {axis.name for axis in result.axes if axis.part is None}
        axes = [(replace(a, part=None) if a.name in whole else a, a.span) for a in result.axes]
        for axis, spans in repeated(axes).items():
            self.fail(
                f"mesh axis '{axis}' occurs twice", *spans, note="a spec uses an axis at most once"
            )


def repeated(pairs: Iterable[tuple[K, Span]]) -> dict[K, list[Span]]:
    """The keys that occur more than once, with all their spans."""
    spans: dict[K, list[Span]] = {}
    for key, span in pairs:
        spans.setdefault(key, []).append(span)
    return {key: found for key, found in spans.items() if len(found) > 1}
