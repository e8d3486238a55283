"""A small model folder and rows to train it on, and a training run in a pool's ranks."""

import json
import shutil
import signal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from model.data.sample import IGNORED
from model.training.interruption import Interruption
from model.training.settings import Settings
from model.training.train import train
from model.training.trainer import Trainer
from tests.hf_oracle import hf_model
from tests.tiny import image, tiny_raw
from vlshard.comm.agreement import AgreedError

STEP = Trainer.step
CPU = torch.device("cpu")
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SIZES = [[(16, 24)], [], [(8, 8), (24, 16)], [], [], [], [(16, 16)]]  # of images, by row
STEPS, BATCH, LR, DECAY, WARMUP = 5, 3, 2e-3, 0.1, 2


def make_folder(path):
    """A model folder with weights and the processor's settings, and rows with images."""
    hf_model(tiny_raw(), seed=1).save_pretrained(path / "model")
    (path / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    write_rows(path, SIZES)
    return path


def write_rows(folder, sizes, seed=0):
    """Pre-tokenised rows in ``rows.jsonl``; an image of height h has h / 4 rows of patches."""
    draw = np.random.default_rng(seed)
    with (folder / "rows.jsonl").open("w") as file:
        for row, images in enumerate(sizes):
            ids = draw.integers(1, 80, 4).tolist()
            for item, (height, width) in enumerate(images):
                pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{row}.{item}.png")
                ids += image((1, height // 4, width // 4))
            ids += draw.integers(1, 80, 3 + row % 3).tolist()
            labels = [token if token < 80 and i != 2 else IGNORED for i, token in enumerate(ids)]
            names = [f"{row}.{item}.png" for item in range(len(images))]
            file.write(json.dumps({"input_ids": ids, "labels": labels, "images": names}) + "\n")


def options(folder, **changes):
    found = {
        "plan": "plans/single.py",
        "model": folder / "model",
        "data": folder / "rows.jsonl",
        "steps": STEPS,
        "batch": BATCH,
        "lr": LR,
        "schedule": "cosine",
        "warmup": WARMUP,
        "weight_decay": DECAY,
        "decay": "all",
        "shuffle": False,
    }
    return found | changes


def run_train(options, rank=None, step=0, number=signal.SIGINT):
    """The exit status, or the text of the error that all ranks share.

    A rank gets a signal in a step, or before the first one if that is 0.
    """
    interruption = Interruption()
    if dist.get_rank() == rank and step == 0:
        interruption.note(number)

    def steps(trainer, batch, signal=0):
        if dist.get_rank() == rank and batch.step == step:
            interruption.note(number)
        return STEP(trainer, batch, interruption.signal)

    try:
        with mock.patch.object(Trainer, "step", steps):
            return train(Settings(**options), CPU, interruption)
    except AgreedError as error:
        return str(error)


def read_metrics(path):
    """The lines of steps."""
    return read_lines(path, "loss")


def read_lines(path, key):
    """The lines of a metrics file that have a field."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if key in line]


def broken_rows(folder, target, line, text=None, **changes):
    """A copy of the rows with one line (from 1) replaced."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("model"))
    lines = (folder / "rows.jsonl").read_text().splitlines()
    lines[line - 1] = text or json.dumps(json.loads(lines[line - 1]) | changes)
    (target / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return target / "rows.jsonl"
