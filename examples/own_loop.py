"""Train a Qwen3-VL-MoE under a plan, with a loss and an optimizer of your own.

``torchrun --nproc-per-node 2 examples/own_loop.py plans/vision_cp_ulysses.py MODEL ROWS.jsonl``,
where MODEL is a Hugging Face folder; without torchrun, and under ``plans/single.py``, it is one
process. ``examples/train.py`` is the training program with everything around it.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from model.checkpoint import has_weights, load_checkpoint
from model.config import load_config
from model.data import ImageReader, Loader, Reading, RowFile
from model.modules import Qwen3VLMoe, fill
from model.training.launch import join_ranks, run
from model.training.trainer import to_device
from vlshard import clip_gradients, load_plan, shard_model


def smoothed(states: Tensor, head: Tensor, targets: Tensor, num_labels: Tensor) -> Tensor:
    """This rank's term of the loss: a sum over its labelled tokens, over the number of all."""
    logits = F.linear(states, head).float()
    return F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum") / num_labels


def train(
    device: torch.device, plan: str, folder: str, data: str, *, steps: int = 20, batch: int = 4
) -> Iterator[float]:
    """The loss of each step; every rank calls it alike."""
    config = load_config(folder)
    bound = load_plan(plan, dist.get_world_size()).bind(config, dist.get_world_size())

    with torch.device("meta"):
        model = Qwen3VLMoe(config, bound.checkpoint)
    parts = bound.parts  # the parameters that the plan's splits cut, if it has any
    shard_model(
        model,
        bound.storages,
        bound.mesh,
        parts=parts,
        lookups=config.lookups(),
        device_type=device.type,
    )
    model.to_empty(device=device)
    if has_weights(folder):
        load_checkpoint(model, folder, config, parts=parts)
    else:
        fill(model, config, seed=0, parts=parts)
    counted = [bound.counts(name) for name, _ in model.named_parameters()]
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)

    images = ImageReader(folder, config)
    rows = RowFile(data, folder, config, images)
    reading = Reading(num_rows=len(rows), batch=batch, steps=steps)
    group = dist.new_group(backend="gloo")  # of the thread that reads ahead
    with Loader(reading, rows, images, config, bound, group) as batches:
        for step in batches:
            loss = torch.zeros((), device=device)
            for part in step.parts:  # micro-batches: what this rank computes, and what moves where
                term = model(to_device(part.inputs, device), part.at, loss=smoothed)
                term.backward()
                loss += term.detach()
            dist.all_reduce(loss)  # to be shown; gradients are summed over ranks by now
            clip_gradients(model.parameters(), 1.0, counted)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()


def main() -> int:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("plan", "model", "rows"):
        parser.add_argument(name)
    given = parser.parse_args()
    steps = train(join_ranks(), given.plan, given.model, given.rows)
    for number, loss in enumerate(steps, 1):
        if dist.get_rank() == 0:
            print(f"step {number}  loss {loss:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    run(main)
