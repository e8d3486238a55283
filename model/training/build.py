"""The model of a training run: its parts stored as the plan says, its weights loaded or made."""

import fnmatch

import torch
import torch.distributed as dist
from torch import nn

from model.checkpoint import has_weights, load_checkpoint, unread_weights
from model.modules import Qwen3VLMoe, fill, refuse_expert_widths
from model.training.job import DTYPES, KNOWN_ERRORS, Job
from model.training.report import say, warn
from model.training.settings import Settings
from model.training.trainer import rate_factors
from vlshard import ShardError, shard_model
from vlshard.comm import together
from vlshard.language import nearest


def build_model(settings: Settings, job: Job, device: torch.device) -> nn.Module:
    """The model as the plan stores it, with the folder's weights or new ones."""
    model = make_model(settings, job, device)
    fill_model(settings, job, model, device)
    return model


def make_model(settings: Settings, job: Job, device: torch.device) -> nn.Module:
    """The model as the plan stores it, on the meta device: without values."""
    with together(*KNOWN_ERRORS, ValueError), torch.device("meta"):
        refuse_expert_widths(job.config, DTYPES[settings.dtype], job.bound.parts)
        model = Qwen3VLMoe(job.config, job.bound.checkpoint)
        freeze(model, settings.freeze)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        rate_factors(trained, settings.lr_of)
    shard_model(
        model,
        job.bound.storages,
        job.bound.mesh,
        parts=job.bound.parts,
        lookups=job.config.lookups(),
        compute_dtype=DTYPES[settings.dtype],
        device_type=device.type,
    )
    return model


def fill_model(settings: Settings, job: Job, model: nn.Module, device: torch.device) -> None:
    """Give a model that was just made memory, and the folder's weights or new ones."""
    model.to_empty(device=device)
    wanted = job.saved.of_model if job.saved else None
    with together(*KNOWN_ERRORS, group=job.patient):
        if has_weights(settings.model) and (wanted is None or wanted):
            layout, parts = settings.expert_layout, job.bound.parts
            found = load_checkpoint(model, settings.model, job.config, layout, parts, wanted)
            tell_weights(settings, list(found.files))
        elif wanted is None:
            fill(model, job.config, settings.seed, job.bound.parts)
            tell_weights(settings, [])


def tell_weights(settings: Settings, read: list[str]) -> None:
    """Say on rank 0 where the weights are from, and which files look like weights but are not read.

    Args:
      settings: of the run.
      read: files of the model's folder that were read; none if weights were made.
    """
    if dist.get_rank():
        return
    files = f"{read[0]}" if len(read) == 1 else f"{len(read)} files"
    loaded, made = f"loaded from {settings.model} ({files})", f"made new, from seed {settings.seed}"
    say(f"weights: {loaded if read else made}")
    unread = unread_weights(settings.model)
    if unread:
        names = ", ".join(unread)
        warn(f"warning: looks like weights, is not read (only safetensors are): {names}")


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Take the parameters whose names match a pattern out of training."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ShardError(f"--freeze {pattern!r} matches no parameter{nearest(pattern, names)}")
        for name in matches:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ShardError("--freeze leaves no parameter to train")
