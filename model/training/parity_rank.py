"""One rank of ``python -m model.training.parity``: loss and raw gradients of batches, to files."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from model.data import Loader
from model.training.build import build_model
from model.training.interruption import Interruption
from model.training.job import KNOWN_ERRORS, prepare
from model.training.launch import join_ranks, run
from model.training.parity import LOSSES, add_shared
from model.training.settings import Settings
from model.training.trainer import Trainer
from vlshard.comm import together
from vlshard.storage import Parts


def measure(settings: Settings, folder: Path, device: torch.device) -> int:
    """Compute batches without moving a weight; rank 0 writes what came out.

    Args:
      settings: what is computed, and under which plan; ``steps`` is the number of batches.
      folder: for the loss of each batch, and the gradients of the first, a file a parameter.
      device: of this rank.
    """
    job = prepare(settings, device)
    trainer = Trainer(settings, build_model(settings, job, device), device, job.bound)
    group, losses = dist.new_group(backend="gloo"), list[float]()
    with Loader(job.reading, job.rows, job.images, job.config, job.bound, group) as batches:
        for batch in batches:
            losses.append(trainer.gradients(batch))
            if batch.step == 1:
                write_gradients(trainer.model, job.bound.parts, folder)
    with together(*KNOWN_ERRORS):
        if dist.get_rank() == 0:
            (folder / LOSSES).write_text(json.dumps(losses))
    return 0


def write_gradients(model: nn.Module, parts: Parts, folder: Path) -> None:
    """Write each parameter's gradient whole; every rank takes part, one gradient at a time."""
    for i, (name, parameter) in enumerate(model.named_parameters()):
        gradient = parameter.grad
        if gradient is None:
            continue
        gathered = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        whole = parts.gather(name, gathered)
        with together(*KNOWN_ERRORS):
            if dist.get_rank() == 0:
                save_file({name: whole.cpu().contiguous()}, folder / f"{i:06}.safetensors")


def settings_of(arguments: Sequence[str] | None = None) -> tuple[Settings, Path]:
    """What a rank's command line says: what is computed, and where what came out is written."""
    parser = argparse.ArgumentParser()
    add_shared(parser.add_argument)
    parser.add_argument("--folder", type=Path, required=True)
    options = vars(parser.parse_args(arguments))
    folder, steps = options.pop("folder"), options.pop("batches")
    paths = {name: Path(options.pop(name)) for name in ("model", "data")}
    return Settings(**options, **paths, steps=steps), folder


def main() -> None:
    """Be one rank."""
    interruption = Interruption()
    interruption.install()
    settings, folder = settings_of()

    def of_rank() -> int:
        return measure(settings, folder, join_ranks(settings.device, interruption))

    run(of_rank, interruption, speak=False)


if __name__ == "__main__":
    main()
