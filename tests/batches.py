"""Global batches of every shape that a run can meet, on distinct random data."""

from dataclasses import dataclass, field

import numpy as np
import torch

from model.config.config import Config
from model.data.sample import Sample

TEXT_IDS = (10, 90)


@dataclass(frozen=True)
class Batch:
    """Samples of one global batch, and the pixel rows of each of their images."""

    samples: tuple[Sample, ...]
    pixels: dict[tuple[int, int], torch.Tensor]
    micro_batch: int | None = None


@dataclass
class Builder:
    """Draws samples one after another from one seed."""

    config: Config
    seed: int
    samples: list[Sample] = field(default_factory=list)
    pixels: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.draw = np.random.default_rng(self.seed)
        self.torch_draw = torch.Generator().manual_seed(self.seed)

    def text(self, count):
        return self.draw.integers(*TEXT_IDS, size=count).tolist()

    def add(self, *parts, labelled=None):
        """Add one sample.

        Args:
          *parts: an int is that many text tokens, a (h, w) an image, a (t, h, w) a video.
          labelled: positions that carry labels; None for all text tokens.
        """
        config, index = self.config, len(self.samples)
        ids, grids = [], []
        for part in parts:
            if isinstance(part, int):
                ids += self.text(part)
                continue
            frames, (height, width) = (part[0] if len(part) == 3 else 1), part[-2:]
            token = config.video_token_id if len(part) == 3 else config.image_token_id
            grids.append((frames, height, width))
            for _ in range(frames):
                stamp = self.text(2) if len(part) == 3 else []
                run = [token] * (height * width // config.unit)
                ids += [*stamp, config.vision_start_token_id, *run, config.vision_end_token_id]
            vision = config.vision
            width_of_patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            rows = frames * height * width
            self.pixels[index, len(grids) - 1] = torch.randn(
                rows, width_of_patch, generator=self.torch_draw
            )
        low, high = TEXT_IDS
        labels = [i if low <= i < high else -100 for i in ids]
        if labelled is not None:
            labels = [i if at in labelled else -100 for at, i in enumerate(ids)]
        self.samples.append(Sample(ids=np.array(ids), labels=np.array(labels), grids=tuple(grids)))
        return self

    def batch(self, micro_batch=None):
        return Batch(tuple(self.samples), self.pixels, micro_batch)


def batches(config: Config) -> dict[str, Batch]:
    """Every case by name; each serves 1, 2 and 4 data-parallel ranks."""
    return {
        "mixed sizes": Builder(config, 1)
        .add(5, (4, 6), 3)
        .add(4, (2, 2), 2, (6, 4), 5)
        .add(3, (8, 4), 6)
        .add(7, (4, 4), (2, 6), 4)
        .batch(),
        "images on the first rank only": Builder(config, 2)
        .add(4, (4, 6), 3, (4, 4), 2)
        .add(9)
        .add(12)
        .add(5)
        .batch(),
        "images on the last rank only": Builder(config, 3)
        .add(6)
        .add(11)
        .add(8)
        .add(3, (4, 6), 5)
        .batch(),
        "text only": Builder(config, 4).add(6).add(11).add(8).add(3).batch(),
        "one sample, one image": Builder(config, 5).add(4, (4, 6), 6).batch(),
        "one-token images": Builder(config, 6)
        .add(2, *[(2, 2)] * 9, 3)
        .add(3, (2, 2), 2)
        .add(1, *[(2, 2)] * 4, 5)
        .batch(),
        "labels on one rank only": Builder(config, 7)
        .add(4, (4, 4), 5, labelled=())
        .add(7, labelled=())
        .add(6, labelled=())
        .add(3, (2, 4), 8, labelled=(9, 10, 12))
        .batch(),
        "labels in one zigzag half": Builder(config, 8)
        .add(3, (4, 6), 2, labelled=(11, 12))
        .batch(),
        "no label at all": Builder(config, 9)
        .add(4, (4, 4), 5, labelled=())
        .add(7, labelled=())
        .batch(),
        "unequal token counts": Builder(config, 10)
        .add(40)
        .add(2)
        .add(3, (4, 4), 1)
        .add(17, (6, 6), 9)
        .add(5)
        .batch(),
        "lengths 1 2 7 13 17": Builder(config, 11)
        .add(1)
        .add(2)
        .add(7)
        .add(3, (4, 6), 2)
        .add(17)
        .batch(),
        "video and image": Builder(config, 12)
        .add(1, (3, 4, 4), 2)
        .add(1, (4, 4), 1, (2, 2, 4), 3)
        .batch(),
        "micro-batches, uneven": Builder(config, 13)
        .add(5, (4, 6), 3)
        .add(4)
        .add(9)
        .add(3, (8, 4), 6)
        .add(7, (4, 4), (2, 6), 4)
        .batch(micro_batch=1),
    }
