"""Reads many random texts as specs and arrows: each is read, or refused by a SpecError.

``python -m tests.vlshard.fuzz`` reads 200,000 and prints its numbers; ``make parity`` runs it. A
text that is read has to print a text that reads back equal; an error has to point inside the text;
a text that takes longer than two seconds of the processor is a hang.
"""

import argparse
import signal
import time
from collections import Counter
from random import Random
from types import FrameType

from tests.vlshard.texts import slipped, soup, valid_arrow, valid_spec
from vlshard.language.errors import SpecError
from vlshard.language.spec import arrow, spec

SECONDS = 2.0


def texts(rng: Random):
    """Endless kinds and texts: valid ones, their prefixes, slips of them, and soup."""
    while True:
        for kind, make in (("spec", valid_spec), ("arrow", valid_arrow)):
            text = make(rng)
            yield kind, text
            yield "prefix", text[: rng.randint(0, len(text))]
            yield "slip", slipped(rng, text)
        yield "soup", soup(rng)


def read(text: str) -> str:
    """Read a text as a spec and as an arrow; says what came of it.

    Raises: AssertionError if it is read wrongly or refused badly; whatever else the package raises.
    """
    said = ""
    for reader in (spec, arrow):
        try:
            result = reader(text)
        except SpecError as error:
            check_error(error, text)
        else:
            written = str(result) if reader is spec else " -> ".join(map(str, result))
            assert reader(written) == result, f"{text!r} prints {written!r}"
            said = f"read as {reader.__name__}"
    return said or "refused"


def check_error(error: SpecError, text: str) -> None:
    """The message shows the text and points at characters of it."""
    assert error.text == text
    lines = str(error).splitlines()
    assert lines[0], f"{text!r}: no headline"
    if text.strip():
        assert error.spans, f"{text!r}: no caret: {error}"
    for start, stop in error.spans:
        assert 0 <= start <= stop <= len(text), f"{text!r}: {error.spans}"
        assert start < stop or not text.strip(), f"{text!r}: an empty span: {error}"


def fuzz(count: int, seed: int) -> tuple[Counter[tuple[str, str]], float]:
    """Read so many texts; gives what came of each kind, and the longest seconds of one."""
    rng, found, longest = Random(seed), Counter(), 0.0
    source = texts(rng)
    for _ in range(count):
        kind, text = next(source)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        started = time.thread_time()
        found[kind, read(text)] += 1
        longest = max(longest, time.thread_time() - started)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return found, longest


def _hang(_number: int, _frame: FrameType | None) -> None:
    raise AssertionError(f"a text takes longer than {SECONDS:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGVTALRM, _hang)
    started = time.perf_counter()
    found, longest = fuzz(options.texts, options.seed)
    for (kind, said), count in sorted(found.items()):
        print(f"{kind:8}{said:16}{count:9,}")
    seconds = time.perf_counter() - started
    print(f"{sum(found.values()):,} texts in {seconds:.1f} s, the longest {longest * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
