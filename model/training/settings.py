"""The settings of a training run: frozen, checked, and read from a command line."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from model.training.command_line import SettingsError, parse

AUTO = "auto"  # of ``resume``: the newest whole checkpoint


@dataclass(frozen=True)
class Settings:
    """What to train, on what, and how; see ``--help`` for the meaning of each field.

    ``steps`` is 0 where ``epochs`` says how long, until ``for_rows`` knows.

    Raises: SettingsError where two of them contradict each other.
    """

    plan: str
    model: Path
    data: Path
    batch: int
    steps: int = 0
    epochs: float | None = None
    micro_batch: int | None = None
    reduce: str = "every"
    pack: bool = False
    aux_loss: bool = False
    lr: float = 1e-5
    min_lr: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    weight_decay: float = 0.0
    decay: str = "matrices"
    lr_of: tuple[tuple[str, float], ...] = ()
    clip: float = 1.0
    seed: int = 0
    shuffle: bool = True
    dtype: str = "float32"
    freeze: tuple[str, ...] = ()
    expert_layout: str | None = None
    eval: Path | None = None
    eval_every: int | None = None
    metrics: Path | None = None
    peak_flops: float = 0.0
    tensorboard: Path | None = None
    profile: tuple[int, int] | None = None
    profile_dir: Path = Path("profile")
    save: Path | None = None
    plot: Path | None = None
    overwrite: bool = False
    device: str | None = None
    measure_cost: bool = False
    show_deal: bool = False
    dry_run: bool = False
    ranks: int | None = None
    shutdown_timeout: float = 300.0
    check_data: bool = False
    skip_bad: bool = False
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    keep: int | None = None
    checkpoint_async: bool = False
    resume: Path | None = None
    resume_anyway: bool = False
    stop_after: int | None = None
    save_timeout: float = 3600.0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.steps and self.epochs is None:
            raise SettingsError("--steps or --epochs is needed: how long is it trained?")
        if self.eval_every and not self.eval:
            raise SettingsError(f"--eval-every {self.eval_every} needs --eval: on which rows?")
        if self.min_lr > self.lr:
            rates = f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}"
            raise SettingsError(f"{rates}: the rate falls from --lr to --min-lr")
        if self.min_lr and self.schedule == "constant":
            text = f"--min-lr {self.min_lr:g} is never reached by --schedule constant"
            raise SettingsError(f"{text}: leave it out, or take --schedule cosine")
        for name in ("checkpoint_every", "keep", "checkpoint_async", "stop_after"):
            if getattr(self, name) and not self.checkpoint:
                raise SettingsError(f"--{name.replace('_', '-')} needs --checkpoint: where to?")
        if str(self.resume) == AUTO and not self.checkpoint:
            raise SettingsError("--resume auto needs --checkpoint: it looks there")
        if self.resume_anyway and self.resume is None:
            raise SettingsError("--resume-anyway needs --resume: from where?")

    @classmethod
    def from_command_line(cls, arguments: Sequence[str] | None = None) -> Self:
        """Parse a command line; None is the process's own.

        Raises: SettingsError if it is wrong (every rank has the same command line).
        """
        return cls(**parse(arguments))

    def for_rows(self, num_rows: int) -> Self:
        """The same settings with their number of steps, of data with so many rows."""
        if self.epochs is None:
            return self
        return replace(self, steps=max(math.ceil(self.epochs * num_rows / self.batch), 1))

    def lr_at(self, step: int) -> float:
        """Learning rate of a step (counted from 0): linear warm-up, then the schedule."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * done)) / 2
