"""A trained model on its way out, as a Hugging Face folder."""

import json
from dataclasses import asdict

from torch import nn

from model.checkpoint import COST_FILE, RECORD_FILE, save_checkpoint
from model.training.job import KNOWN_ERRORS, Job
from model.training.measure import cost_text
from model.training.settings import Settings
from vlshard.comm import together


def export(settings: Settings, job: Job, model: nn.Module, steps: int) -> None:
    """Write a Hugging Face folder, with how it was trained; every rank takes part.

    Args:
      settings: of the run; its ``save`` is the folder.
      job: what was trained on what.
      model: stored as the plan says.
      steps: that were done.
    Raises: AgreedError on every rank if it cannot be written; what stood there is still there.
    """
    assert settings.save is not None
    extra = {RECORD_FILE: training_record(settings, steps)}
    if settings.measure_cost:
        extra[COST_FILE] = cost_text(job.bound.cost)
    with together(*KNOWN_ERRORS, group=job.patient):
        save_checkpoint(
            model,
            settings.save,
            job.config,
            source=settings.model,
            expert_layout=settings.expert_layout,
            extra=extra,
            parts=job.bound.parts,
            group=job.patient,
        )


def training_record(settings: Settings, steps: int) -> str:
    """How a model was trained, as JSON: the settings, and the steps that were done."""
    record = {"trained_by": "vlshard", "steps_done": steps, "settings": asdict(settings)}
    return json.dumps(record, indent=2, default=str) + "\n"
