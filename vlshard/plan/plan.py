"""A plan: which layout each boundary has, how parameters are stored, how attention is met."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from vlshard.attention import Kernel, Mode, probe
from vlshard.comm import AgreedError, Mesh, refuse_differences
from vlshard.language import (
    PlanError,
    ShardError,
    spec,
)
from vlshard.plan.bound_plan import BoundPlan
from vlshard.plan.check import (
    check_checkpoint,
    check_cost,
    check_kinds,
    check_regather,
    check_world,
)
from vlshard.plan.check_attention import check_cover, check_modes
from vlshard.plan.check_layouts import check_homes, check_layouts
from vlshard.plan.check_splits import check_doors, check_splits
from vlshard.plan.check_storage import check_storage, unit_storages
from vlshard.plan.model_config import PATCHES, TOKENS, ModelConfig
from vlshard.plan.plan_file import build_plan
from vlshard.plan.splits import derive
from vlshard.plan.tokens import pack_tokens
from vlshard.storage import Storage

# Splits whose inside all tokens of a group enter.
ENTERED = ("text.q", "text.mlp")


@dataclass(frozen=True)
class Plan:
    """Where everything lives, for one world size.

    For models with a vision encoder, a decoder and a config that is a ``ModelConfig``: see
    docs/plans.md. Other models need none: ``reshard``, ``attend`` and ``shard_model`` serve any.

    Attributes:
      mesh: named axes, outermost first.
      params: storage of parameters by name pattern (``**`` is anything); the first match wins.
      layouts: spec of ``vision.patches`` and ``text.tokens``; all other boundaries follow. Tokens
        are padded rows, ``b s m``, or a pack of samples, ``(smp s) m``.
      attention: how each site's attention is met, where tokens are cut over an axis.
      checkpoint: recompute every k-th block of a site, for example ``{"vision": 2}``.
      cost: (a, b): a frame of n patches costs ``a * n**2 + b * n`` where ``.balance`` deals frames;
        None counts the multiplications of the model's vision blocks.
      splits: layouts of the inner dims of blocks, such as ``{"text.mlp": "f@tp"}``: the parameters
        that have these dims are cut alike, and each rank computes its part.
      regather: sites, such as ``("text",)``, whose blocks do not keep for backward what they gather
        on the way into a split, but gather it again.
      source: file that the plan was read from, for messages.
    """

    mesh: Mesh
    params: Mapping[str, Storage]
    layouts: Mapping[str, str]
    attention: Mapping[str, Mode] = field(default_factory=dict[str, Mode])
    checkpoint: Mapping[str, int] = field(default_factory=dict[str, int])
    cost: tuple[float, float] | None = None
    splits: Mapping[str, str] = field(default_factory=dict[str, str])
    regather: tuple[str, ...] = ()
    source: str = "plan"

    def bind(self, config: ModelConfig, world: int, *, kernel: Kernel | None = None) -> "BoundPlan":
        """Check the plan against a model and a world, and make its process groups.

        Where ranks are running, each of them calls this, and they compare what they have bound: a
        plan may have been made otherwise on one of them.

        Args:
          config: the model's config.
          world: number of ranks.
          kernel: attention in place of the device's own; tried here, and refused if it is wrong.
        Returns: the plan, ready to be stepped.
        Raises: PlanError that lists every fault; AgreedError on all ranks, before any group is
          made, if they have bound different things, or another rank's plan has faults.
        """
        running = dist.is_initialized() and dist.get_world_size() == world
        faults = list(self.faults(config, world))
        if faults:
            error = _joined(faults, self.source)
            if running:
                with suppress(AgreedError):
                    refuse_differences({}, fault=str(error))
            raise error
        if kernel:
            probe(kernel)
        bound = BoundPlan(
            mesh=self.mesh,
            config=config,
            patches=spec(self.layouts[PATCHES]),
            tokens=spec(self.layouts[TOKENS]),
            attention=self.attention,
            storages=unit_storages(self.params, self.mesh, config),
            checkpoint=self.checkpoint,
            cost=self.cost or config.patch_cost,
            splits=derive(self.splits, self.mesh, config),
            kernel=kernel,
            regather=tuple(self.regather),
        )
        if running:
            refuse_differences(bound.facts(), headline="ranks have bound different plans")
        if dist.is_initialized():
            self.mesh.make_groups(bound.group_axes)
            if bound.vocabulary:
                self.mesh.host_group(bound.vocabulary.axes)
        return bound

    def packed(self) -> "Plan":
        """The same plan with the samples of a micro-batch one after another, without padding.

        Returns: a plan whose layout of tokens has the same splits, each sample cut as a padded row
          was.
        Raises: SpecError or LayoutError if the layout of tokens cannot be packed.
        """
        entering = [self.splits[name] for name in ENTERED if name in self.splits]
        named = [axis for text in entering for axis in spec(text).axes]
        over = {part for axis in named for part in self.mesh.parts_of.get(str(axis), ())}
        where = f"{self.source} {TOKENS}"
        text = pack_tokens(self.layouts[TOKENS], self.mesh, over, where=where)
        return replace(self, layouts={**self.layouts, TOKENS: text})

    def faults(self, config: ModelConfig, world: int) -> Iterable[ShardError]:
        """Everything that keeps the plan from running on this model and world."""
        mesh, source = self.mesh, self.source
        if kinds := list(check_kinds(vars(self), source)):
            yield from kinds
            return
        yield from check_world(mesh, world, source)
        yield from check_storage(self.params, mesh, config, source)
        splits = list(check_splits(self.splits, mesh, config, source))
        yield from splits
        yield from check_checkpoint(self.checkpoint, config, source)
        yield from check_regather(self.regather, config, source)
        yield from check_cost(self.cost, source)
        yield from check_modes(self.attention, mesh, config, source)
        layouts = list(check_layouts(self.layouts, mesh, config, source))
        yield from layouts
        if not layouts:
            yield from check_homes(self.layouts, mesh, source)
            if not splits:
                derived = derive(self.splits, mesh, config)
                doors = list(check_doors(derived, self.splits, self.layouts, source))
                yield from doors
                if not doors:
                    yield from check_cover(self.attention, self.layouts, derived, config, source)


def _joined(faults: list[ShardError], source: str) -> PlanError:
    """One error for all faults."""
    if len(faults) == 1:
        (fault,) = faults
        return PlanError(
            fault.headline,
            text=fault.text,
            spans=fault.spans,
            where=fault.where,
            notes=fault.notes,
        )
    listed = [line for fault in faults for line in str(fault).splitlines()]
    return PlanError(f"{len(faults)} faults in {source}", notes=listed)


def load_plan(name: str, world: int) -> Plan:
    """The plan that a file or a module defines with ``plan(world)``.

    Args:
      name: path of a Python file (``plans/baseline_dp.py``) or a module (``plans.baseline_dp``).
      world: number of ranks.
    Raises: PlanError if there is no such plan, it defines no ``plan``, or running it fails.
    """
    plan, source = build_plan(name, world)
    if not isinstance(plan, Plan):
        raise PlanError(f"plan({world}) of {name} gave {type(plan).__name__}, not a Plan")
    return replace(plan, source=source)
