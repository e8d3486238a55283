"""Random texts of the spec language: valid ones, and ones that a slip of the hand makes of them."""

from random import Random

AXES = ("dp", "cp", "tp", "ep", "cp.0", "cp.1", "cp.ring", "cp.ulysses")
NAMES = ("b", "s", "h", "d", "kv", "img", "smp", "e", "f", "c", "m", "vocab", "_0", "h2")
ALPHABET = "abs3 @.+()->cpzigome_\n\t0é€\x00|{}'\\"


def valid_spec(rng: Random) -> str:
    """A spec that the grammar allows, with the blanks that it allows too."""
    return _spec(rng, rng, pending=rng.random() < 0.25)


def valid_arrow(rng: Random) -> str:
    """An arrow whose sides have the same dims, each split in its own way."""
    seed, sign = rng.random(), rng.choice(["->", " -> ", "  ->\n"])
    left = _spec(Random(seed), rng, pending=rng.random() < 0.25)
    return left + sign + _spec(Random(seed), rng, pending=False)


def _spec(shape: Random, rng: Random, *, pending: bool) -> str:
    """A spec whose dims are drawn by one generator, and everything else by another."""
    names, axes = shape.sample(NAMES, len(NAMES)), _distinct_axes(rng)
    words = [_dim(shape, rng, names, axes) for _ in range(shape.randint(0, 4))]
    if shape.random() < 0.15:
        words.insert(shape.randint(0, len(words)), "...")
    if axes and pending:
        words += ["+", *(axes.pop() for _ in range(rng.randint(1, len(axes))))]
    return _spaced(rng, words)


def slipped(rng: Random, text: str) -> str:
    """A text with one to three characters or pieces lost, doubled, swapped or put in."""
    for _ in range(rng.randint(1, 3)):
        at, width = rng.randint(0, len(text)), rng.randint(1, 4)
        piece = text[at : at + width]
        match rng.randrange(6):
            case 0:
                text = text[:at] + text[at + width :]
            case 1:
                text = text[:at] + piece + text[at:]
            case 2:
                text = text[:at] + piece[::-1] + text[at + width :]
            case 3:
                text = text[:at] + rng.choice(ALPHABET) + text[at:]
            case 4:
                text = text[:at] + rng.choice(ALPHABET) + text[at + 1 :]
            case _:
                text = text[:at]
    return text


def soup(rng: Random) -> str:
    """Any characters, mostly those of the language."""
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randint(0, 40)))


def _distinct_axes(rng: Random) -> list[str]:
    """Axes that can stand in one spec: whole ones, or parts of them."""
    axes = rng.sample(AXES, len(AXES))
    whole = rng.random() < 0.5
    return [axis for axis in axes if whole != (axis == "cp") or ("." not in axis and axis != "cp")]


def _dim(shape: Random, rng: Random, names: list[str], axes: list[str]) -> str:
    """A plain, packed, fused or fixed dim."""
    match shape.randrange(5):
        case 0 | 1:
            return names.pop() + _splits(rng, axes, (None, "zigzag", "home"))
        case 2:
            first = names.pop() + _splits(rng, axes, (None, "balance", "home"))
            inner = names.pop() + _splits(rng, axes, (None, "zigzag"))
            return f"({first} {inner})" + _splits(rng, axes, (None,))
        case 3:
            inner = f"({names.pop()}{_splits(rng, axes, (None,))} {shape.randint(1, 9)})"
            return f"({shape.randint(1, 99)} {inner})" + _splits(rng, axes, (None,))
        case _:
            return str(shape.randint(1, 10**6))


def _splits(rng: Random, axes: list[str], orders: tuple[str | None, ...]) -> str:
    """No, one or two splits; ``.home`` at most once."""
    text = ""
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        if not axes:
            break
        joined = rng.random() < 0.2 and len(axes) > 1
        text += "@" + (f"({axes.pop()} {axes.pop()})" if joined else axes.pop())
        order = rng.choice(orders)
        if order and not (order == "home" and ".home" in text):
            text += f".{order}"
    return text


def _spaced(rng: Random, words: list[str]) -> str:
    """Words with one blank between, or several, or a line break."""
    blanks = (" ", " ", " ", "  ", "\n ", "\t")
    return "".join(word + rng.choice(blanks) for word in words).rstrip(" ")
