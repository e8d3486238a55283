"""A plan: which layout each boundary has, how parameters are stored, how attention is met."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch.distributed as dist

from vlshard.attention import Kernel, Mode, Site, probe, schedule
from vlshard.comm import Mesh
from vlshard.language import (
    Layout,
    Name,
    Packing,
    PlanError,
    ShardError,
    Spec,
    home_axes,
    layout,
    spec,
    spec_axes,
)
from vlshard.plan import check
from vlshard.plan.check_attention import check_cover, check_modes
from vlshard.plan.hand_off import hand_off, merged, visual_positions
from vlshard.plan.header import Share, StepHeader
from vlshard.plan.model_config import PATCHES, TOKENS, ModelConfig
from vlshard.plan.plan_file import build_plan
from vlshard.plan.step_boundaries import StepBoundaries
from vlshard.plan.tokens import is_packed, pack_tokens, token_places
from vlshard.storage import Storage


@dataclass(frozen=True)
class Plan:
    """Where everything lives, for one world size.

    Attributes:
      mesh: named axes, outermost first.
      params: storage of parameters by name pattern (``**`` is anything); the first match wins.
      layouts: spec of ``vision.patches`` and ``text.tokens``; all other boundaries follow. Tokens
        are padded rows, ``b s m``, or a pack of samples, ``(smp s) m``.
      attention: how each site's attention is met, where tokens are cut over an axis.
      checkpoint: recompute every k-th block of a site, for example ``{"vision": 2}``.
      cost: (a, b): a frame of n patches costs ``a * n**2 + b * n`` where ``.balance`` deals frames;
        None counts the multiplications of the model's vision blocks.
      splits: parameters cut for compute; not available yet.
      source: file that the plan was read from, for messages.
    """

    mesh: Mesh
    params: Mapping[str, Storage]
    layouts: Mapping[str, str]
    attention: Mapping[str, Mode] = field(default_factory=dict[str, Mode])
    checkpoint: Mapping[str, int] = field(default_factory=dict[str, int])
    cost: tuple[float, float] | None = None
    splits: Mapping[str, str] = field(default_factory=dict[str, str])
    source: str = "plan"

    def bind(self, config: ModelConfig, world: int, *, kernel: Kernel | None = None) -> "BoundPlan":
        """Check the plan against a model and a world, and make its process groups.

        Args:
          config: the model's config.
          world: number of ranks.
          kernel: attention in place of the device's own; tried here, and refused if it is wrong.
        Returns: the plan, ready to be stepped.
        Raises: PlanError that lists every fault, the same on all ranks, before anything is sent.
        """
        faults = list(self.faults(config, world))
        if faults:
            raise _joined(faults, self.source)
        if kernel:
            probe(kernel)
        bound = BoundPlan(self, config, kernel)
        if dist.is_initialized():
            self.mesh.make_groups(bound.group_axes)
        return bound

    def packed(self) -> "Plan":
        """The same plan with the samples of a micro-batch one after another, without padding.

        Returns: a plan whose layout of tokens has the same splits, each sample cut as a padded row
          was.
        Raises: SpecError or LayoutError if the layout of tokens cannot be packed.
        """
        text = pack_tokens(self.layouts[TOKENS], where=f"{self.source} {TOKENS}")
        return replace(self, layouts={**self.layouts, TOKENS: text})

    def faults(self, config: ModelConfig, world: int) -> Iterable[ShardError]:
        """Everything that keeps the plan from running on this model and world."""
        mesh, source = self.mesh, self.source
        if kinds := list(check.check_kinds(vars(self), source)):
            yield from kinds
            return
        yield from check.check_world(mesh, world, source)
        yield from check.check_storage(self.params, mesh, config, source)
        if self.splits:
            yield PlanError("splits of parameters are not available yet", where=f"{source} splits")
        yield from check.check_checkpoint(self.checkpoint, config, source)
        yield from check.check_cost(self.cost, source)
        yield from check_modes(self.attention, mesh, config, source)
        layouts = list(check.check_layouts(self.layouts, mesh, config, source))
        yield from layouts
        if not layouts:
            yield from check.check_homes(self.layouts, mesh, source)
            yield from check_cover(self.attention, self.layouts, mesh, config, source)


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


class StepLayouts(NamedTuple):
    """Layouts of one micro-batch."""

    patches: Layout
    merged: Layout
    tokens: Layout


@dataclass(frozen=True)
class BoundPlan:
    """A plan that fits a model and a world."""

    plan: Plan
    config: ModelConfig
    kernel: Kernel | None = None

    @property
    def mesh(self) -> Mesh:
        """The ranks by axis."""
        return self.plan.mesh

    @cached_property
    def patches(self) -> Spec:
        """Layout of the patches."""
        return spec(self.plan.layouts[PATCHES])

    @cached_property
    def tokens(self) -> Spec:
        """Layout of the tokens."""
        return spec(self.plan.layouts[TOKENS])

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which rows are read; ranks that differ elsewhere read the same rows."""
        return home_axes(self.tokens, self.mesh) or home_axes(self.patches, self.mesh)

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks that read rows."""
        return len(self.mesh.peers(self.data_axes, self.mesh.rank))

    @property
    def data_rank(self) -> int:
        """This rank's place among them."""
        return list(self.mesh.peers(self.data_axes, self.mesh.rank)).index(self.mesh.rank)

    @cached_property
    def hand_off_axes(self) -> tuple[str, ...]:
        """Axes over which visual rows may travel to their placeholders."""
        mesh = self.mesh
        used = {*spec_axes(self.patches, mesh), *spec_axes(self.tokens, mesh)}
        homes = set(home_axes(self.patches, mesh)) & set(home_axes(self.tokens, mesh))
        return tuple(part for part in mesh.parts if part in used - homes)

    @property
    def group_axes(self) -> list[tuple[str, ...]]:
        """Axes of every process group that activations need."""
        modes = self.plan.attention.values()
        axes = {self.hand_off_axes, *(axes for mode in modes for axes in mode.ways.groups)}
        return sorted(axes - {()})

    @cached_property
    def divisor(self) -> int:
        """Rows, where samples are padded to rows, have a multiple of this many positions."""
        dim, count = self.tokens.dims[1], 1
        for split in dim.splits if isinstance(dim, Name) else ():
            size = self.mesh.span([str(axis) for axis in split.axes])
            count *= 2 * size if split.order == "zigzag" else size
        return count

    @cached_property
    def copies(self) -> int:
        """Number of ranks that compute each row of tokens."""
        split = spec_axes(self.tokens, self.mesh)
        return self.mesh.size // len(self.mesh.peers(split, self.mesh.rank))

    @property
    def cost(self) -> tuple[float, float]:
        """Coefficients by which frames are dealt."""
        return self.plan.cost or self.config.patch_cost

    @property
    def storages(self) -> dict[str, Storage]:
        """How the parameters of each unit are stored, children before parents."""
        return {unit: self.storage(unit) for unit in self.config.units()}

    def storage(self, unit: str) -> Storage:
        """How the parameters of a unit are stored, every axis of the mesh named."""
        names = self.config.parameter_shapes()
        chosen = check.storage_patterns(self.plan.params, names)
        first = next(n for n in names if check.unit_of(n, self.config.units()) == unit)
        shard = self.mesh.expand(self.plan.params[chosen[first]].shard)
        named = self.mesh.expand(self.plan.params[chosen[first]].replicate)
        rest = [part for part in self.mesh.parts if part not in (*shard, *named)]
        return Storage(shard, (*named, *rest))

    def layouts(self, header: StepHeader) -> StepLayouts:
        """Where patches, merged rows and tokens of a micro-batch live; numbers only.

        Args:
          header: the micro-batch, the same on every rank.
        """
        packing = Packing(
            header.segments,
            unit=self.config.unit,
            home=header.segment_home,
            cost=self.cost,
            homes=self.data_ranks,
        )
        return StepLayouts(
            patches=layout(self.patches, self.mesh, where=PATCHES, img=packing, c=1),
            merged=layout(self.patches, self.mesh, where=PATCHES, img=merged(packing), c=1),
            tokens=self._token_layout(header),
        )

    def _token_layout(self, header: StepHeader) -> Layout:
        """Samples one after another, or each in a row of its own that is padded."""
        if is_packed(self.tokens):
            lengths = [sample.tokens for sample in header.samples]
            pack = Packing(lengths, home=header.home, homes=self.data_ranks)
            return layout(self.tokens, self.mesh, where=TOKENS, smp=pack, m=1)
        rows = Packing([1] * len(header.samples), home=header.home, homes=self.data_ranks)
        length = self._padded(header)
        return layout(self.tokens, self.mesh, where=TOKENS, b=rows, s=length, m=1)

    def _padded(self, header: StepHeader) -> int:
        """Positions for which every sample has room; a pack needs no padding."""
        return max(-(-header.longest // self.divisor), 1) * self.divisor

    def describe_deal(self, header: StepHeader) -> str:
        """Who gets which patches of a micro-batch, and how evenly, beside leaving them at home.

        Args:
          header: the micro-batch, the same on every rank.
        Returns: one line per rank, and the largest load over an even share of the work, before and
          after; frames that several ranks encode count once in it.
        """
        dealt = self.layouts(header).patches
        read = "@" + self.mesh.text(self.data_axes) + ".home" if self.data_axes else ""
        home = layout(f"(img{read} s) c", self.mesh, where=None, **dealt.sizes)
        rows, costs = dealt.loads(), dealt.loads(by="cost")
        work = layout("(img s) c", self.mesh, where=None, **dealt.sizes).loads(by="cost")[0]
        even = max(work / self.mesh.size, 1e-300)
        lines = [f"{len(header.segments)} frames, {sum(header.segments):,} patches"]
        lines += [
            f"  rank {rank}: {int(rows[rank]):,} patches, {costs[rank] / even:.2f} of an even share"
            for rank in range(self.mesh.size)
        ]
        before, after = (where.loads(by="cost").max() / even for where in (home, dealt))
        lines.append(f"  largest share {after:.2f}; where they are read {before:.2f}")
        return "\n".join(lines)

    def share(self, header: StepHeader, rank: int) -> Share:
        """What a rank holds of a micro-batch; no ranks need to run."""
        return self._share(header, self.layouts(header), rank)

    def _share(self, header: StepHeader, where: StepLayouts, rank: int) -> Share:
        samples, positions = token_places(where.tokens, rank)
        patches, _ = where.patches.indices(rank)
        return Share(patches, samples, positions, header.visual, self.copies)

    def step(self, header: StepHeader) -> StepBoundaries:
        """Plan one micro-batch: what this rank holds of it, and what moves where.

        Args:
          header: the micro-batch, the same on every rank.
        """
        mesh, modes = self.mesh, self.plan.attention
        where = self.layouts(header)
        sites = {"vision": self._vision(header, where), "text": self._text(header, where)}
        table = visual_positions(header, self.config.unit, self._padded(header))
        return StepBoundaries(
            share=self._share(header, where, mesh.rank),
            schedules={
                name: schedule(site, modes.get(name), self.kernel) for name, site in sites.items()
            },
            merged=hand_off(where.merged, where.tokens, table, self.hand_off_axes, mesh),
        )

    def _vision(self, header: StepHeader, where: StepLayouts) -> Site:
        """Patches: every row of a frame sees all of it."""
        heads = self.config.heads["vision"]
        return Site(self.mesh, where.patches, header.segments, causal=False, heads=heads)

    def _text(self, header: StepHeader, where: StepLayouts) -> Site:
        """Tokens: each sees those before it of its sample; a pack is one row of a batch."""
        packed = is_packed(self.tokens)
        padded = (self._padded(header),) * len(header.samples)
        lengths = tuple(sample.tokens for sample in header.samples) if packed else padded
        heads = self.config.heads["text"]
        return Site(self.mesh, where.tokens, lengths, causal=True, heads=heads, one_row=packed)
