"""Optimizer steps on a model under a plan."""

import math

import torch
import torch.distributed as dist
from torch import nn

from model.data import Batch, ModelInputs
from model.training.settings import Settings
from vlshard.comm import AgreedError
from vlshard.pytree import tree_map
from vlshard.storage import clip_gradients, grad_norm


class Trainer:
    """Optimizer steps on one model; the same numbers come out on every rank."""

    def __init__(self, settings: Settings, model: nn.Module, device: torch.device) -> None:
        """Make the optimizer, over the parameters that are not frozen."""
        self.model, self._settings, self._device = model, settings, device
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=settings.lr,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=settings.weight_decay,
            fused=device.type in ("cpu", "cuda"),
        )
        self._last = "no step was finished before it"

    def step(self, batch: Batch, stop: bool) -> tuple[float, float, bool]:
        """One optimizer step.

        Args:
          batch: this rank's part of it.
          stop: whether this rank is asked to stop.
        Returns: the loss over the global batch, the gradient norm before clipping, and whether
          any rank is asked to stop.
        Raises: AgreedError on every rank, before any weight moves, if loss or norm is not finite.
        """
        self._optimizer.zero_grad(set_to_none=True)
        loss, stopped = self._forward_backward(batch, stop)
        self._check("loss", loss, batch.step)
        norm = float(self._clip())
        self._check("gradient norm", norm, batch.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr_at(batch.step - 1)
        self._optimizer.step()
        self._last = f"step {batch.step} had loss {loss:.6g} and gradient norm {norm:.6g}"
        return loss, norm, stopped

    def _forward_backward(self, batch: Batch, stop: bool) -> tuple[float, bool]:
        """Add up gradients over micro-batches; the loss is summed over ranks apart from them."""
        told = torch.tensor([0.0, float(stop)], device=self._device)
        for part in batch.parts:
            loss = self.model(to_device(part.inputs, self._device), part.at)
            told[0] += loss.detach()
            if loss.requires_grad:
                loss.backward()
        dist.all_reduce(told)
        total, stops = told.tolist()
        return total, stops > 0

    def _clip(self) -> torch.Tensor:
        if self._settings.clip:
            return clip_gradients(self._trained, self._settings.clip)
        return grad_norm(self._trained)

    def _check(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise AgreedError(f"{name} is {value} at step {step}", notes=[self._last])


def to_device(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    """The inputs where the model is; the loader makes them on the host."""
    return tree_map(lambda x: None if x is None else x.to(device, non_blocking=True), inputs)
