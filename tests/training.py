"""One training step, with and without a plan, and what it left: what parity tests compare."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from model.config.config import Config
from model.data.inputs import build_inputs, plan_step
from model.data.sample import sample_facts
from model.modules.init import fill
from model.modules.qwen3_vl_moe import Qwen3VLMoe
from tests.batches import Batch
from tests.tiny import whole_share
from vlshard.plan.boundaries import local_boundaries
from vlshard.plan.header import make_headers
from vlshard.plan.plan import load_plan
from vlshard.storage.norm import clip_gradients, grad_norm
from vlshard.storage.parts import Parts
from vlshard.storage.shard_model import shard_model


@dataclass
class Outcome:
    """What one or more steps left.

    Attributes:
      losses: loss of each step, summed over ranks.
      norms: gradient norm of each step, before clipping.
      gradients: raw gradients of the first step, whole; None where there is none.
      faults: what is wrong with them, where they were compared instead of gathered; else None.
      weights: weights after the last step, whole.
      patches: per step, patch rows of each rank.
      tokens: per step, token positions of each rank.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    faults: list[str] | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    patches: list[list[int]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def loss(self) -> float:
        return self.losses[0]

    @property
    def norm(self) -> float:
        return self.norms[0]


class Run:
    """A model under a plan (or none), fed whole batches that every rank knows."""

    def __init__(
        self,
        config: Config,
        plan: str | None,
        *,
        seed: int = 0,
        freeze=(),
        checkpoint=None,
        packed: bool = False,
        aux_loss: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        self.config = config
        self.bound = None
        if plan is None:
            self.model = Qwen3VLMoe(config, checkpoint)
        else:
            world = dist.get_world_size()
            chosen = load_plan(plan, world)
            self.bound = (chosen.packed() if packed else chosen).bind(config, world)
            with torch.device("meta"):
                self.model = Qwen3VLMoe(config, checkpoint or self.bound.checkpoint)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(name.startswith(part) for part in freeze))
        if self.bound is not None:
            shard_model(
                self.model,
                self.bound.storages,
                self.bound.mesh,
                parts=self.bound.parts,
                lookups=self.bound.config.lookups(),
                compute_dtype=dtype,
            )
            self.model.to_empty(device="cpu")
        self.parts = self.bound.parts if self.bound else Parts()
        fill(self.model, config, seed, self.parts)
        if self.bound is None:
            self.model.to(dtype)
        self.outcome = Outcome()
        self.aux_loss, self.balances = aux_loss, []

    def headers(self, batch: Batch):
        facts = [sample_facts(s, i, self.config) for i, s in enumerate(batch.samples)]
        ranks = self.bound.data_ranks if self.bound else 1
        return make_headers(facts, ranks, batch.micro_batch)

    def forward_backward(self, batch: Batch) -> float:
        """Raw gradients of one global batch; returns the loss, summed over ranks."""
        total = torch.zeros(())
        counts = torch.zeros(2, dtype=torch.int64)
        for header in self.headers(batch):
            loss, rows = self.one_forward_backward(batch, header)
            total += loss
            counts += rows
        everyone = [counts]
        if self.bound:
            dist.all_reduce(total)
            everyone = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, counts)
        self.outcome.patches.append([int(rows[0]) for rows in everyone])
        self.outcome.tokens.append([int(rows[1]) for rows in everyone])
        return float(total)

    def one_forward_backward(self, batch: Batch, header, at=None):
        """One micro-batch: this rank's loss term, and how many patches and tokens it computed."""
        share, planned, inputs = self.prepared(batch, header)
        more = {"micro_batches": len(self.headers(batch)), "balances": self.balances}
        loss = self.model(inputs, at or planned, self.aux_loss, **more)
        if loss.requires_grad:  # a text-only step of a frozen decoder trains nothing
            loss.backward()
        rows = [len(share.patches), share.samples.size]
        return loss.detach(), torch.tensor(rows)

    def prepared(self, batch: Batch, header):
        """What this rank holds of a micro-batch, what it calls in it, and its tensors."""
        share = self.bound.share(header, dist.get_rank()) if self.bound else whole_share(header)
        offsets = [facts.row for facts in header.samples]
        samples = {i: batch.samples[row] for i, row in enumerate(offsets)}
        pixels = {
            (i, item): rows
            for i, row in enumerate(offsets)
            for (owner, item), rows in batch.pixels.items()
            if owner == row
        }
        inputs = build_inputs(header, share, samples, pixels, self.config)
        if self.bound is None:
            return share, local_boundaries(header.segments), inputs
        return share, *plan_step(self.bound, header, inputs)

    def raw_gradients(self) -> dict[str, torch.Tensor | None]:
        return {
            name: None if p.grad is None else self.parts.gather(name, full(p.grad)).clone()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def probe(self, batch: Batch, expected: "Outcome | None" = None) -> Outcome:
        """Numbers and raw gradients of one batch, or what is wrong with them; the weights stay.

        Args:
          batch: whole, on every rank.
          expected: if given, what each rank holds of the gradients is compared with its, and no
            gradient is gathered.
        """
        self.outcome = Outcome()
        self.model.zero_grad(set_to_none=True)
        self.outcome.losses.append(self.forward_backward(batch))
        if expected is None:
            self.outcome.gradients = self.raw_gradients()
        else:
            self.outcome.faults = sharded_faults(self.model, expected, self.parts)
        self.outcome.norms.append(float(grad_norm(self.trained, self.counted)))
        return self.outcome

    def train(
        self, batches, *, steps: int, weight_decay: float = 0.0, lr=1e-3, after=None
    ) -> Outcome:
        """AdamW as training has it, over the batches in turn, clipped to norm 1.

        Args:
          batches: whole, on every rank.
          steps: how many.
          weight_decay: of AdamW.
          lr: of AdamW.
          after: called with the number of each step once it is done.
        """
        self.outcome = Outcome()
        decay = weight_decay
        optimizer = torch.optim.AdamW(self.trained, lr=lr, weight_decay=decay, fused=True)
        for step in range(steps):
            self.model.zero_grad(set_to_none=True)
            self.outcome.losses.append(self.forward_backward(batches[step % len(batches)]))
            if step == 0:
                self.outcome.gradients = self.raw_gradients()
            self.outcome.norms.append(float(clip_gradients(self.trained, 1.0, self.counted)))
            optimizer.step()
            if after is not None:
                after(step)
        self.outcome.weights = {
            name: self.parts.gather(name, full(p.detach())).clone()
            for name, p in self.model.named_parameters()
        }
        return self.outcome

    @property
    def counted(self) -> list[bool] | None:
        named = [name for name, p in self.model.named_parameters() if p.requires_grad]
        return [self.bound.counts(name) for name in named] if self.bound else None

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradient_faults(found: Outcome, expected: Outcome) -> list[str]:
    """Parameters whose raw gradient is off, with by how much; see ``_judged``."""
    if found.gradients.keys() != expected.gradients.keys():
        return [f"keys differ: {found.gradients.keys() ^ expected.gradients.keys()}"]
    pairs = ((name, found.gradients[name], right) for name, right in expected.gradients.items())
    return _judged(expected, [_off(*pair) for pair in pairs])


def sharded_faults(model: torch.nn.Module, expected: Outcome, parts: Parts) -> list[str]:
    """The same, each rank looking at what it holds; every rank calls this alike and gets all."""
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if found.keys() != expected.gradients.keys():
        return [f"keys differ: {found.keys() ^ expected.gradients.keys()}"]
    pairs = (
        (name, found[name], right if right is None else own_part(name, right, parts))
        for name, right in expected.gradients.items()
    )
    off = torch.tensor([_off(*pair) for pair in pairs], dtype=torch.float64)
    dist.all_reduce(off)
    return _judged(expected, off.tolist())


def own_part(name: str, whole: torch.Tensor, parts: Parts) -> torch.Tensor:
    """What this rank computes with of a whole parameter or gradient."""
    local = whole.new_empty(parts.shape(name, tuple(whole.shape)))
    block = tuple(slice(0, size) for size in local.shape)
    for here, there in parts.rectangles(name, block):
        local[here] = whole[there]
    return local


def _off(name: str, gradient: torch.Tensor | None, right: torch.Tensor | None) -> tuple:
    """Squared distance of a gradient, and values in rows that nothing reads.

    Of a DTensor it is this rank's part of them: the sum over all ranks is the whole, or more than
    that where there are copies.
    """
    if gradient is None or right is None:
        return (0.0 if gradient is right else float("inf")), 0.0
    if isinstance(gradient, DTensor):
        placed = gradient.device_mesh, gradient.placements
        right = distribute_tensor(right, *placed, src_data_rank=None).to_local()
        gradient = gradient.to_local()
    distance = float((gradient.double() - right.double()).square().sum())
    if "embed_tokens" not in name and "experts" not in name:
        return distance, 0.0
    unread = (right == 0).flatten(1).all(1)
    return distance, float(gradient[unread].count_nonzero())


def _judged(expected: Outcome, off: list[tuple]) -> list[str]:
    """What is wrong with gradients that are off by so much.

    The bound is ``norm(difference) <= 1e-5 norm(reference) + 1e-6 x global norm``: fp32 rounding
    of sums taken in another order. Rows that nothing reads have gradient zero.
    """
    norms = {
        name: 0.0 if right is None else float(right.double().norm())
        for name, right in expected.gradients.items()
    }
    scale = math.hypot(*norms.values())
    faults = []
    for (name, norm), (distance, unread) in zip(norms.items(), off, strict=True):
        limit = 1e-5 * norm + 1e-6 * scale
        if not distance**0.5 <= limit or unread:
            faults.append(f"{name}: off by {distance**0.5:.2e}, limit {limit:.2e}, {unread=:g}")
    return faults
