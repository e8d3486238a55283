"""What a training run needs, read and checked before anything of the model is allocated."""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from model.checkpoint import CheckpointError, check_checkpoint, has_weights
from model.config import Config, ConfigError, load_config
from model.data import DATA_ERRORS, ImageReader, Reading, RowFile
from model.training.fingerprints import compare_inputs, compare_settings
from model.training.measure import kept_cost, measure_cost
from model.training.outputs import check_outputs
from model.training.report import say
from model.training.resume import open_checkpoints, tell
from model.training.saved_run import SavedRun, refuse_changes
from model.training.settings import Settings
from vlshard import BoundPlan, load_plan
from vlshard.comm import Group, agree, together

KNOWN_ERRORS = (*DATA_ERRORS, ConfigError, CheckpointError)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """What the settings name, read and checked.

    Attributes:
      settings: with the number of steps, also where it was given in passes over the data.
      patient: a group of all ranks, which waits as long as reading and writing weights may take.
      evaluated: rows to evaluate on, or None.
      saved: the checkpoint that the run goes on from, or None.
    """

    settings: Settings
    config: Config
    bound: BoundPlan
    rows: RowFile
    images: ImageReader
    reading: Reading
    patient: Group
    evaluated: RowFile | None = None
    saved: SavedRun | None = None


def prepare(settings: Settings, device: torch.device) -> Job:
    """Read and check everything but the weights; nothing of the model is allocated yet."""
    compare_settings(settings)
    limit = timedelta(seconds=settings.save_timeout)
    patient = dist.new_group(backend="gloo", timeout=limit)
    saved = open_checkpoints(settings, patient)
    with together(*KNOWN_ERRORS):
        config = load_config(settings.model)
        plan = load_plan(settings.plan, dist.get_world_size())
        images = ImageReader(settings.model, config)
        rows = RowFile(settings.data, settings.model, config, images)
        other = settings.eval and RowFile(settings.eval, settings.model, config, images)
        settings = settings.for_rows(len(rows))
        if has_weights(settings.model):
            check_checkpoint(settings.model, config, settings.expert_layout)
        if dist.get_rank() == 0:
            check_outputs(settings, config, saved and saved.id)
    compare_inputs(settings, config, {"": rows} | ({"eval ": other} if other else {}))
    if saved:
        with together(*KNOWN_ERRORS):
            for text in refuse_changes(saved, settings, config, rows):
                tell(f"goes on anyway: {text}")
    if settings.measure_cost:
        kept = saved and saved.cost
        plan = replace(plan, cost=kept or measured_cost(config, settings, device))
    with together(*KNOWN_ERRORS):
        bound = plan.bind(config, dist.get_world_size())
        if settings.pack:
            bound = plan.packed().bind(config, dist.get_world_size())
    reading = Reading(
        num_rows=len(rows),
        batch=settings.batch,
        steps=settings.steps,
        micro_batch=settings.micro_batch,
        seed=settings.seed,
        shuffle=settings.shuffle,
    )
    if saved:
        reading = reading.after(saved.step, saved.run["position"])
    return Job(settings, config, bound, rows, images, reading, patient, other, saved)


def measured_cost(config: Config, settings: Settings, device: torch.device) -> tuple[float, float]:
    """What a frame costs on rank 0, now or when the model was saved; every rank gets the same."""
    mine = None
    with together(*KNOWN_ERRORS, RuntimeError):
        if dist.get_rank() == 0:
            kept = kept_cost(settings.model)
            mine = kept or measure_cost(config, device, DTYPES[settings.dtype])
            words = "as saved with the model" if kept else "measured now"
            told = f"{mine[0]:.3g} n^2 + {mine[1]:.3g} n seconds, {words}"
            say(f"a frame of n patches costs {told}")
    a, b = agree(mine)[0]
    return a, b
