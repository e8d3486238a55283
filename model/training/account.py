"""Makes of a step what is kept of it."""

import torch.distributed as dist

from model.data import Batch
from model.training.flops import step_flops
from model.training.job import Job
from model.training.record import StepRecord, kept_rows
from model.training.trainer import StepResult, Trainer


class Account:
    """What a run needs to say how fast it is."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        """Remember what is trained.

        Args:
          job: what is trained on what.
          trainer: does the steps.
        """
        self._job, self._trainer = job, trainer
        self._trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        self._peak = job.settings.peak_flops * dist.get_world_size()

    def record(self, batch: Batch, found: StepResult, seconds: float, waited: float) -> StepRecord:
        """The record of a step.

        Args:
          batch: what it was done on.
          found: what it gave.
          seconds: that it took, with the wait for its batch.
          waited: seconds of that wait.
        """
        settings = self._job.settings
        flops = 0
        if batch.labels:  # else nothing is computed
            flops = step_flops(self._job.config, batch.headers, self._trained)
        lr = settings.lr_at(batch.step - 1)
        rate = flops / max(seconds, 1e-9)
        return StepRecord(
            step=batch.step,
            loss=found.loss,
            grad_norm=found.norm,
            lr=lr,
            tokens=batch.tokens,
            labels=batch.labels,
            images=batch.images,
            seconds=seconds,
            vision_rows=kept_rows(batch.vision_rows),
            text_rows=kept_rows(batch.text_rows),
            unlabelled=self._trainer.unlabelled,
            epoch=batch.step * settings.batch / len(self._job.rows),
            tokens_per_second=batch.tokens / max(seconds, 1e-9),
            model_flops=flops,
            flops_per_second=rate,
            peak_share=rate / self._peak if self._peak else None,
            peak_mib=kept_rows(found.memory),
            data_seconds=waited,
            aux_loss=found.aux_loss,
            lrs={pattern: factor * lr for pattern, factor in settings.lr_of},
            **{f"{part}_seconds": spent for part, spent in found.seconds.items()},
        )
