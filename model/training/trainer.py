"""Optimizer steps on a model under a plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model.data import Batch, ModelInputs
from model.training.interruption import SIGNALS
from model.training.job import DTYPES
from model.training.settings import Settings
from vlshard import BoundPlan
from vlshard.comm import AgreedError, agree
from vlshard.pytree import tree_map
from vlshard.storage import clip_gradients, grad_norm, local_part

MOST_NAMED = 4


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank.

    Attributes:
      loss: over the global batch.
      norm: of the gradient, before clipping.
      signal: number of the signal by which a rank is asked to stop, or 0.
    """

    loss: float
    norm: float
    signal: int


class Trainer:
    """Optimizer steps on one model; the same numbers come out on every rank.

    Attributes:
      model: stored as its plan says.
      steps: steps done, those without a label included.
      unlabelled: steps without any label.
    """

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        device: torch.device,
        bound: BoundPlan | None = None,
    ) -> None:
        """Make the optimizer, over the parameters that are not frozen.

        Args:
          settings: of the run.
          model: stored as its plan says.
          device: of this rank.
          bound: the plan; it says which rank counts what of a gradient in the norm.
        """
        self.model, self._settings, self._device = model, settings, device
        self.steps = self.unlabelled = 0
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._trained = list(trained.values())
        self._counted = [bound.counts(name) for name in trained] if bound else None
        self._optimizer = torch.optim.AdamW(
            decay_groups(self._trained, settings.weight_decay, settings.decay),
            lr=settings.lr,
            betas=(0.9, 0.999),
            eps=1e-8,
            fused=device.type in ("cpu", "cuda"),
        )
        self._last = "no step was finished before it"

    def step(self, batch: Batch, signal: int = 0) -> StepResult:
        """One optimizer step; a batch without any label moves no weight and no moment.

        Args:
          batch: this rank's part of it.
          signal: number of the signal by which this rank is asked to stop, or 0.
        Raises: AgreedError on every rank, before any weight moves, if loss or norm is not finite.
        """
        self.steps = batch.step
        if not batch.labels:
            self.unlabelled += 1
            _, signal = self._sum(torch.zeros((), device=self._device), signal)
            return StepResult(0.0, 0.0, signal)
        self._optimizer.zero_grad(set_to_none=True)
        loss, signal = self._forward_backward(batch, signal)
        self._check("loss", loss, batch.step)
        norm = float(self._clip())
        self._check("gradient norm", norm, batch.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr_at(batch.step - 1)
        self._optimizer.step()
        self._last = f"step {batch.step} had loss {loss:.6g} and gradient norm {norm:.6g}"
        return StepResult(loss, norm, signal)

    def check_weights(self) -> None:
        """Look at the weights that the last step left; no step after it would find them broken.

        Raises: AgreedError on every rank that names parameters with values that are not finite.
        """
        mine = [
            name
            for name, parameter in self.model.named_parameters()
            if not bool(torch.isfinite(local_part(parameter)).all())
        ]
        told = agree(mine)
        names = [name for name, _ in self.model.named_parameters() if any(name in t for t in told)]
        if names:
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            some = ", ".join(names[:MOST_NAMED]) + more
            text = f"weights are not finite after step {self.steps}: {some}"
            raise AgreedError(text, notes=[self._last, "nothing is exported"])

    def _forward_backward(self, batch: Batch, signal: int) -> tuple[float, int]:
        """Add up gradients over micro-batches; the loss is summed over ranks apart from them."""
        total = torch.zeros((), device=self._device)
        for part in batch.parts:
            part.at.send_ahead(self._device, DTYPES[self._settings.dtype])
            loss = self.model(to_device(part.inputs, self._device), part.at)
            total += loss.detach()
            if loss.requires_grad:
                loss.backward()
        return self._sum(total, signal)

    def _sum(self, loss: torch.Tensor, signal: int) -> tuple[float, int]:
        """The loss of all ranks, and the signal that any of them has had."""
        told = [float(signal == number) for number in SIGNALS]
        summed = torch.cat([loss.view(1), torch.tensor(told, device=self._device)])
        dist.all_reduce(summed)
        total, *counts = summed.tolist()
        had = [int(number) for number, count in zip(SIGNALS, counts, strict=True) if count]
        return total, max(had, default=0)

    def _clip(self) -> torch.Tensor:
        if self._settings.clip:
            return clip_gradients(self._trained, self._settings.clip, self._counted)
        return grad_norm(self._trained, self._counted)

    def _check(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise AgreedError(f"{name} is {value} at step {step}", notes=[self._last])


def decay_groups(
    parameters: Sequence[nn.Parameter], weight_decay: float, decay: str
) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer: those that decay, and those that do not.

    Args:
      parameters: all that are trained.
      weight_decay: of those that decay.
      decay: ``matrices`` spares parameters of one dim (norms and biases), ``all`` none.
    """
    decays = [decay == "all" or parameter.ndim >= 2 for parameter in parameters]
    groups = [
        {
            "params": [p for p, found in zip(parameters, decays, strict=True) if found is wanted],
            "weight_decay": weight_decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    return [group for group in groups if group["params"]]


def to_device(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    """The inputs where the model is; the loader makes them on the host."""
    return tree_map(lambda x: None if x is None else x.to(device, non_blocking=True), inputs)
