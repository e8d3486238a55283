"""Make a data set of handwritten digits: images, chat rows and a small model folder to train.

``python examples/digits.py --out DIR --seed S`` writes scikit-learn's 1,797 scanned digits as PNG
files and builds from them rows that ask for the 1 to 4 digits shown, each in its own image. Images
have several sizes. Scans to train on are drawn several times, each time shifted and turned a
little; scans that are held out occur in no training image and stay as they were scanned. Nothing
is downloaded.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from PIL import Image
from sklearn.datasets import load_digits

from examples.digits_model import PROMPT, write_model

NUM_SCANS, NUM_HELD_OUT = 1797, 360
SCAN_SIDE = 8
MOST_DIGITS = 4
Size = tuple[int, int]
SIZES = ((32, 32), (64, 32), (32, 64), (64, 64))  # height, width; 32x32 pixels are one token
SIZE_CHANCES = (0.7, 0.1, 0.1, 0.1)
FILL = 0.9  # the digit's side as a part of the image's shorter one
SHAKE = 0.1  # of scans to train on: most shift [digit's side] and turn [right angles]


class Scans:
    """All scans, as small grey images, and the digits that they show."""

    def __init__(self):
        digits = load_digits()
        ink = np.round(np.pad(digits.images, ((0, 0), (1, 1), (1, 1))) * (255 / 16))
        self.images = [Image.fromarray(scan) for scan in ink.astype(np.uint8)]
        self.digits = [str(digit) for digit in digits.target]

    def draw(self, scan: int, size: Size, rng: Generator, shake: float = 0.0) -> Image.Image:
        """Draw a scan into an image, about as large as fits.

        In an image that is longer one way, the digit is at one end or in the middle.

        Args:
          scan: index of the scan.
          size: height and width of the image [pixels].
          rng: where chance comes from.
          shake: most by which the digit is shifted [its side] and turned [right angles].
        Returns: a grey image, white on black.
        """
        height, width = size
        short = min(size)
        down, right, turn = rng.uniform(-shake, shake, size=3)
        place = rng.integers(-1, 2) / 2
        scale = SCAN_SIDE / (FILL * short)
        y = height / 2 + place * (height - short) + down * FILL * short
        x = width / 2 + place * (width - short) + right * FILL * short
        cos = math.cos(turn * math.pi / 2) * scale
        sin = math.sin(turn * math.pi / 2) * scale
        middle = SCAN_SIDE / 2 + 1  # of a scan with its margin
        affine = (cos, sin, middle - cos * x - sin * y, -sin, cos, middle + sin * x - cos * y)
        method, filter_ = Image.Transform.AFFINE, Image.Resampling.BICUBIC
        return self.images[scan].transform((width, height), method, affine, filter_)


def draw_noise(size: Size, rng: Generator) -> Image.Image:
    """An image of independent grey values."""
    return Image.fromarray(rng.integers(0, 256, size=size, dtype=np.uint8))


def draw_sizes(count: int, rng: Generator) -> list[Size]:
    """Heights and widths of images, by chance."""
    return [SIZES[i] for i in rng.choice(len(SIZES), size=count, p=SIZE_CHANCES)]


def chat_row(images: Sequence[str], answer: str) -> dict[str, Any]:
    """One row: images and the question in the user's turn, the digits in the assistant's."""
    question = "<image>" * len(images) + PROMPT
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": list(images)}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_png(image: Image.Image, path: Path) -> None:
    """Write an image, fast rather than small."""
    image.save(path, compress_level=1)


def write_train(
    out: Path, scans: Scans, chosen: Sequence[int], num_rows: int, variants: int, rng: Generator
) -> None:
    """Write training images, each scan drawn several times, and rows that choose among them.

    Args:
      out: folder of the data set.
      scans: all scans.
      chosen: indices of the scans to train on.
      num_rows: number of rows to write.
      variants: how often each scan is drawn.
      rng: where chance comes from.
    """
    (out / "images" / "train").mkdir(parents=True)
    names, digits = [], []
    for scan in chosen:
        for variant, size in enumerate(draw_sizes(variants, rng)):
            names.append(f"images/train/scan{scan:04d}-{variant}.png")
            digits.append(scans.digits[scan])
            save_png(scans.draw(scan, size, rng, SHAKE), out / names[-1])
    counts = rng.integers(1, MOST_DIGITS + 1, size=num_rows)
    picks = rng.integers(0, len(names), size=(num_rows, MOST_DIGITS))
    rows = [
        chat_row([names[i] for i in pick[:count]], "".join(digits[i] for i in pick[:count]))
        for count, pick in zip(counts, picks.tolist(), strict=True)
    ]
    write_rows(out / "train.jsonl", rows)


def write_heldout(
    out: Path, scans: Scans, chosen: Sequence[int], num_rows: int, rng: Generator
) -> None:
    """Write held-out rows, and their twins whose images are noise of the same sizes.

    Args:
      out: folder of the data set.
      scans: all scans.
      chosen: indices of the held-out scans; each is used before any is used again.
      num_rows: number of rows to write.
      rng: where chance comes from.
    """
    for kind in ("heldout", "noise"):
        (out / "images" / kind).mkdir(parents=True)
    counts = rng.integers(1, MOST_DIGITS + 1, size=num_rows)
    total = int(counts.sum())
    rounds = -(-total // len(chosen))
    queue = np.concatenate([rng.permutation(chosen) for _ in range(rounds)])[:total].tolist()
    names = [f"heldout/scan{scan:04d}-{i}.png" for i, scan in enumerate(queue)]
    for name, scan, size in zip(names, queue, draw_sizes(total, rng), strict=True):
        save_png(scans.draw(scan, size, rng), out / "images" / name)
        save_png(draw_noise(size, rng), out / "images" / name.replace("heldout", "noise"))
    stops = np.cumsum(counts)
    for kind in ("heldout", "noise"):
        rows = [
            chat_row(
                [f"images/{name}".replace("heldout", kind) for name in names[start:stop]],
                "".join(scans.digits[scan] for scan in queue[start:stop]),
            )
            for start, stop in zip(stops - counts, stops, strict=True)
        ]
        write_rows(out / f"{kind}.jsonl", rows)


def write_data(
    out: Path, seed: int = 0, train_rows: int = 32000, heldout_rows: int = 512, variants: int = 8
) -> None:
    """Write the whole data set: model folder, images and rows; the same for the same arguments.

    Args:
      out: folder to make; what an earlier call wrote must be gone.
      seed: chooses the held-out scans and everything drawn.
      train_rows: rows of train.jsonl.
      heldout_rows: rows of heldout.jsonl and of noise.jsonl.
      variants: how often each training scan is drawn.
    """
    rng = np.random.default_rng(seed)
    scans = Scans()
    order = rng.permutation(len(scans.images)).tolist()
    heldout, train = order[:NUM_HELD_OUT], order[NUM_HELD_OUT:]
    assert not set(heldout) & set(train), "a held-out scan would be trained on"
    assert len(heldout) + len(train) == NUM_SCANS, "scans are missing"
    write_model(out / "model")
    write_train(out, scans, train, train_rows, variants, rng)
    write_heldout(out, scans, heldout, heldout_rows, rng)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-rows", type=int, default=32000)
    parser.add_argument("--heldout-rows", type=int, default=512)
    parser.add_argument("--variants", type=int, default=8, help="drawings of each training scan")
    options = parser.parse_args(arguments)
    if options.out.exists() and os.listdir(options.out):
        parser.error(f"{options.out} is not empty")
    write_data(
        options.out, options.seed, options.train_rows, options.heldout_rows, options.variants
    )


if __name__ == "__main__":
    main()
