"""Measures what a frame costs the vision encoder, so that frames can be dealt by it."""

import json
import math
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from model.checkpoint import COST_FILE
from model.config import Config, ConfigError
from model.modules import VisionBlock
from model.rope import vision_rope
from vlshard import local_boundaries

PATCHES = (256, 1024)
LARGEST = 2**40  # patches of all frames of a step, and more
ROUNDS = 5


def kept_cost(folder: str | Path) -> tuple[float, float] | None:
    """The cost that an earlier run measured and saved with its checkpoint.

    Args:
      folder: of the model.
    Returns: as ``measure_cost``; None if there is none.
    Raises: ConfigError if the file does not hold such numbers.
    """
    path = Path(folder) / COST_FILE
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        a, b = (float(found[name]) for name in "ab")
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path} does not hold the numbers a and b: {error}") from error
    largest = a * LARGEST**2 + b * LARGEST
    if not (math.isfinite(largest) and min(a, b) >= 0 < max(a, b)):
        raise ConfigError(f"{path}: a={a} and b={b} are not the cost of a frame")
    return a, b


def cost_text(cost: tuple[float, float]) -> str:
    """What was measured, as it is saved with a checkpoint, so that runs from it deal alike."""
    a, b = cost
    return json.dumps({"a": a, "b": b}) + "\n"


def measure_cost(
    config: Config, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Time one vision block on two frames and solve for the cost of any.

    Times differ from rank to rank, so one rank measures and tells the others.

    Args:
      config: of the model.
      device: where the block runs.
      dtype: of its computation.
    Returns: (a, b) such that a frame of n patches takes about ``a * n**2 + b * n`` [s], forward and
      backward; neither is negative.
    """
    with torch.device(device):
        block = VisionBlock(config.vision).to(dtype)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    short, long = PATCHES
    fast, slow = (_seconds(block, config, count, device, dtype) for count in PATCHES)
    a = max((slow / long - fast / short) / (long - short), 0.0)
    return a, max(fast / short - a * short, 0.0)


def _seconds(
    block: VisionBlock, config: Config, count: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Median time of a forward and backward pass on one frame; the first round is not counted."""
    x = torch.randn(count, config.vision.hidden_size, device=device, dtype=dtype)
    coords = torch.zeros(count, 2, dtype=torch.int64, device=device)
    rope = vision_rope(coords, width=config.vision.head_dim, theta=config.vision.rope_theta)
    at, times = local_boundaries([count]), []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        block(x.requires_grad_(), rope, at).float().square().sum().backward()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
