"""A trained model on its way out, as a Hugging Face folder."""

import torch.distributed as dist
from torch import nn

from model.checkpoint import save_checkpoint
from model.training.job import KNOWN_ERRORS, Job
from model.training.measure import keep_cost
from model.training.settings import Settings
from vlshard.comm import together


def export(settings: Settings, job: Job, model: nn.Module) -> None:
    """Write a Hugging Face folder, and the measured cost with it; every rank takes part."""
    with together(*KNOWN_ERRORS):
        save_checkpoint(
            model,
            settings.save,
            job.config,
            source=settings.model,
            expert_layout=settings.expert_layout,
        )
    with together(OSError):
        if settings.measure_cost and dist.get_rank() == 0:
            keep_cost(settings.save, job.bound.cost)
