"""Optimizer steps on a model under a plan."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from model.data import Batch, MicroBatch, ModelInputs
from model.training.interruption import SIGNALS
from model.training.job import DTYPES
from model.training.settings import Settings
from model.training.stopwatch import Stopwatch, peak_memory
from vlshard import BoundPlan, ShardError
from vlshard.comm import AgreedError, agree
from vlshard.language import nearest
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
      memory: most memory of each rank so far [MiB].
      seconds: of this rank, by part: forward, backward, exchange, update.
      aux_loss: the experts' load balance, which the loss holds times its coefficient; the mean over
        micro-batches. None without ``--aux-loss``.
    """

    loss: float
    norm: float
    signal: int
    memory: tuple[int, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    aux_loss: float | None = None


class Trainer:
    """Optimizer steps on one model; the same numbers come out on every rank.

    Attributes:
      model: stored as its plan says.
      optimizer: of its parameters that are trained.
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
        self._balances: list[torch.Tensor] = []
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._trained = list(trained.values())
        self._counted = [bound.counts(name) for name in trained] if bound else None
        self.optimizer = torch.optim.AdamW(
            decay_groups(
                self._trained,
                settings.weight_decay,
                settings.decay,
                rate_factors([*trained], settings.lr_of),
            ),
            lr=settings.lr,
            betas=(0.9, 0.999),
            eps=1e-8,
            fused=device.type in ("cpu", "cuda"),
        )
        self._decoder_trains = not all(name.startswith("model.visual.") for name in trained)
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
            _, memory, signal = self._sum(torch.zeros((), device=self._device), signal)
            return StepResult(0.0, 0.0, signal, memory)
        watch = Stopwatch(self._device)
        self.optimizer.zero_grad(set_to_none=True)
        loss, memory, signal = self._sum(self._forward_backward(batch, watch), signal)
        watch.lap("exchange")
        self._check("loss", loss, batch.step)
        norm = float(self._clip())
        self._check("gradient norm", norm, batch.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["factor"] * self._settings.lr_at(batch.step - 1)
        self.optimizer.step()
        self._last = f"step {batch.step} had loss {loss:.6g} and gradient norm {norm:.6g}"
        watch.lap("update")
        return StepResult(loss, norm, signal, memory, watch.seconds(), self._balance())

    def gradients(self, batch: Batch) -> float:
        """Loss of a batch; its raw gradients stand in the parameters, and no weight moves.

        Args:
          batch: this rank's part of it.
        """
        self.optimizer.zero_grad(set_to_none=True)
        watch = Stopwatch(self._device)
        return self._sum(self._forward_backward(batch, watch), 0)[0]

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

    def _forward_backward(self, batch: Batch, watch: Stopwatch) -> torch.Tensor:
        """Add up gradients over micro-batches; this rank's term of the loss."""
        total, self._balances = torch.zeros((), device=self._device), list[torch.Tensor]()
        training = [i for i, part in enumerate(batch.parts) if self._trains(part)]
        for i, part in enumerate(batch.parts):
            if self._settings.reduce == "last":
                last = bool(training) and i == training[-1]
                cast(FSDPModule, self.model).set_requires_gradient_sync(last)
            part.at.send_ahead(self._device, DTYPES[self._settings.dtype])
            loss = self.model(
                to_device(part.inputs, self._device),
                part.at,
                self._settings.aux_loss,
                micro_batches=len(batch.parts),
                balances=self._balances,
            )
            total += loss.detach()
            watch.lap("forward")
            if loss.requires_grad:
                loss.backward()
            watch.lap("backward")
        return total

    def _balance(self) -> float | None:
        """The load balance of the last step, if there was one."""
        return float(torch.stack(self._balances).mean()) if self._balances else None

    def _trains(self, part: MicroBatch) -> bool:
        """Whether a micro-batch has a backward: text does not reach what is trained in the tower.

        It is the same on every rank.
        """
        return self._decoder_trains or part.header.visual

    def _sum(self, loss: torch.Tensor, signal: int) -> tuple[float, tuple[int, ...], int]:
        """The loss of all ranks, the memory of each, and the signal that any of them has had."""
        memory = torch.zeros(dist.get_world_size(), device=self._device)
        memory[dist.get_rank()] = peak_memory(self._device)
        (total, *each), signal = sum_over_ranks(torch.cat([loss.view(1), memory]), signal)
        return total, tuple(map(round, each)), signal

    def _clip(self) -> torch.Tensor:
        if self._settings.clip:
            return clip_gradients(self._trained, self._settings.clip, self._counted)
        return grad_norm(self._trained, self._counted)

    def _check(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise AgreedError(f"{name} is {value} at step {step}", notes=[self._last])


def decay_groups(
    parameters: Sequence[nn.Parameter],
    weight_decay: float,
    decay: str,
    factors: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer: those that decay, and those that do not, by their rates.

    Args:
      parameters: all that are trained.
      weight_decay: of those that decay.
      decay: ``matrices`` spares parameters of one dim (norms and biases), ``all`` none.
      factors: by what the rate of each is multiplied; None is by 1.
    Returns: one dict a group; ``factor`` is its entry of ``factors``.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for parameter, factor in zip(parameters, factors or [1.0] * len(parameters), strict=True):
        decays = decay == "all" or parameter.ndim >= 2
        groups.setdefault((decays, factor), []).append(parameter)
    return [
        {"params": found, "weight_decay": weight_decay if decays else 0.0, "factor": factor}
        for (decays, factor), found in groups.items()
    ]


def rate_factors(names: Sequence[str], given: Sequence[tuple[str, float]]) -> list[float]:
    """By what the rate of each parameter is multiplied.

    Args:
      names: of the parameters that are trained.
      given: patterns and factors; of those that match a name the last one counts.
    Raises: ShardError if a pattern matches none of them.
    """
    for pattern, _ in given:
        if not fnmatch.filter(names, pattern):
            close = nearest(pattern, names)
            raise ShardError(f"--lr-of {pattern!r} matches no parameter that is trained{close}")
    fitting = ([f for pattern, f in given if fnmatch.fnmatchcase(n, pattern)] for n in names)
    return [found[-1] if found else 1.0 for found in fitting]


def sum_over_ranks(values: torch.Tensor, signal: int) -> tuple[list[float], int]:
    """Numbers summed over all ranks, and the signal that any of them has had.

    Args:
      values: of this rank, [numbers].
      signal: number of the signal that this rank has had, or 0.
    """
    told = [float(signal == number) for number in SIGNALS]
    summed = torch.cat([values, torch.tensor(told, device=values.device)])
    dist.all_reduce(summed)
    found: list[float] = summed.tolist()
    totals, counts = found[: len(values)], found[len(values) :]
    had = [int(number) for number, count in zip(SIGNALS, counts, strict=True) if count]
    return totals, max(had, default=0)


def to_device(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    """The inputs where the model is; the loader makes them on the host."""
    return tree_map(lambda x: None if x is None else x.to(device, non_blocking=True), inputs)
