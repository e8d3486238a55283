"""What ranks were given, compared before they act on it, so that none goes on with something else.

Where all is alike a checksum goes round, and nothing else. Where it differs each rank says what it
has, and every rank raises one text.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from vlshard.comm.agreement import AgreedError, Group, agree, raise_any

FIX = "fix: give every rank the same command line, plan and files"
MOST = 8  # differences that are named
WIDTH = 72  # characters of a value that are shown


def fingerprint(*parts: bytes | str) -> str:
    """A checksum of texts or bytes and of the borders between them; 16 hexadecimal digits.

    Args:
      parts: what it is of, in order.
    """
    found = blake2b(digest_size=8)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def refuse_differences(
    told: Mapping[str, object],
    group: Group = None,
    *,
    beside: Mapping[str, object] | None = None,
    fault: str | None = None,
    headline: str = "ranks were not given the same",
    fix: str = FIX,
) -> None:
    """Go on only if all ranks have the same; a collective, as ``agree`` is.

    Args:
      told: what this rank has, by name, as text or as what JSON can say.
      group: the ranks that take part; None is all of them.
      beside: what is shown too if something differs.
      fault: why this rank cannot go on at all, or None.
      headline: first line of the message if something differs.
      fix: its last line.
    Raises: AgreedError with the same text on every rank: the faults of all, else what differs and
      on which ranks.
    """
    mine = {name: _shown(value) for name, value in told.items()}
    whole = fingerprint(json.dumps([mine, fault], sort_keys=True))
    alike = len(set(agree(whole, group))) == 1
    if alike and fault is None:
        return
    mine |= {name: _shown(value) for name, value in (beside or {}).items()}
    given = agree([mine, fault], group)
    raise_any([text for _, text in given])
    lines = differences([found for found, _ in given])
    more = [f"... and {len(lines) - MOST} more"] if len(lines) > MOST else []
    raise AgreedError(headline, notes=[*lines[:MOST], *more, fix])


def differences(given: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for each name that ranks have different values of.

    Args:
      given: the values of each rank, by name.
    Returns: lines such as ``lr: 0.001 on ranks 0 to 6; 0.002 on rank 7``.
    """
    names = dict.fromkeys(name for found in given for name in found)
    lines: list[str] = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, found in enumerate(given):
            holders.setdefault(found.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            told = [f"{value} on {ranks_text(ranks)}" for value, ranks in holders.items()]
            more = [f"{len(told) - 4} other values"] if len(told) > 4 else []
            lines.append(f"{name}: {'; '.join([*told[:4], *more])}")
    return lines


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 0, 2 to 5``; the first eight runs of many.

    Args:
      ranks: increasing.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    words = [" to ".join(map(str, run)) for run in runs[:8]]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}{', ...' * (len(runs) > 8)}"


def _shown(value: object) -> str:
    """A value as it is compared and shown: text that is too long ends in its checksum."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    text = " ".join(text.split())
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}... ({fingerprint(text)})"
