"""A plan that fits a model and a world: who holds what of a micro-batch, and what moves where."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from vlshard.attention import Kernel, Mode, Site, schedule
from vlshard.comm import Hosts, Mesh, fingerprint
from vlshard.language import (
    IntArray,
    Layout,
    Name,
    Packing,
    Spec,
    home_axes,
    layout,
    spec,
    spec_axes,
)
from vlshard.plan.deal_lines import deal_lines
from vlshard.plan.doors import Door, group_axes, make_door
from vlshard.plan.hand_off import Placeholders, hand_off, merged
from vlshard.plan.header import Share, StepHeader
from vlshard.plan.inside import Inside, fused_parameters
from vlshard.plan.model_config import PATCHES, TOKENS, VOCABULARY, ModelConfig
from vlshard.plan.regather import Regathered
from vlshard.plan.splits import Splits
from vlshard.plan.step_boundaries import StepBoundaries
from vlshard.plan.tokens import is_packed, token_places
from vlshard.plan.vocabulary import TokenIds, ToldIds, Vocabulary
from vlshard.programs import Peers, Program
from vlshard.storage import (
    FusedDims,
    Parts,
    Storage,
    StoredParameter,
    counts_here,
    stored_parameters,
)


class StepLayouts(NamedTuple):
    """Layouts of one micro-batch."""

    patches: Layout
    merged: Layout
    tokens: Layout


@dataclass(frozen=True)
class BoundPlan:
    """A plan that fits a model and a world; ``Plan.bind`` makes it.

    Attributes:
      mesh: the ranks by axis.
      config: the model's config.
      patches: layout of the patches.
      tokens: layout of the tokens.
      attention: how each site's attention is met.
      storages: how the parameters of each unit are stored, every axis of the mesh named; children
        before parents.
      checkpoint: every which block of a site is recomputed.
      cost: coefficients (a, b) by which frames are dealt.
      splits: how the insides of blocks are cut, and the parameters that follow.
      kernel: attention in place of the device's own.
      regather: sites whose entered tokens are gathered again in backward.
    """

    mesh: Mesh
    config: ModelConfig
    patches: Spec
    tokens: Spec
    attention: Mapping[str, Mode]
    storages: Mapping[str, Storage]
    checkpoint: Mapping[str, int]
    cost: tuple[float, float]
    splits: Splits
    kernel: Kernel | None = None
    regather: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """What ranks must have bound alike, by name; short."""
        parameters = [*self.config.parameter_shapes().items()]
        kernel = self.kernel and getattr(
            self.kernel, "__qualname__", type(self.kernel).__qualname__
        )
        return {
            "mesh": str(self.mesh) or "no axes",
            PATCHES: str(self.patches),
            TOKENS: str(self.tokens),
            **{f"attention of {site}": str(mode) for site, mode in self.attention.items()},
            **_storage_facts(self.storages),
            **{f"checkpoint of {site}": every for site, every in self.checkpoint.items()},
            **{f"split of {name}": str(cut) for name, cut in self.splits.specs.items()},
            **{f"entered tokens of {site}": "gathered again" for site in self.regather},
            "cost of a frame": self.cost,
            "kernel": kernel,
            "heads": {site: tuple(heads) for site, heads in self.config.heads.items()},
            "merge unit": self.config.unit,
            "parameters": f"{len(parameters)}, checksum {fingerprint(repr(parameters))}",
        }

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which rows are read; ranks that differ elsewhere read the same rows."""
        return home_axes(self.tokens, self.mesh) or home_axes(self.patches, self.mesh)

    @cached_property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks that read rows."""
        return self.mesh.span(self.data_axes)

    @cached_property
    def data_rank(self) -> int:
        """This rank's place among them."""
        return Peers(self.mesh, self.data_axes, self.mesh.here).me

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
        modes = self.attention.values()
        axes = {self.hand_off_axes, *(axes for mode in modes for axes in mode.ways.groups)}
        axes |= group_axes((p for pair in self._programs.values() for p in pair), self.mesh)
        axes |= {self.splits.axes(kind) for kind in self._programs}
        axes |= {self.vocabulary.axes, self.vocabulary.apart} if self.vocabulary else set()
        axes |= {axes for kind in self.hosted for axes in self.splits.travelling(self.tokens, kind)}
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
        """Number of ranks that compute the loss of each labelled token.

        They are those that hold the token, or, of a vocabulary that is cut, to which it travels.
        """
        shared = self.vocabulary.axes if self.vocabulary else ()
        split = [part for part in spec_axes(self.tokens, self.mesh) if part not in shared]
        return self.mesh.size // self.mesh.span(split)

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary, if a split cuts it."""
        cut = self.splits.specs.get(VOCABULARY)
        if cut is None or not (axes := self.splits.axes(VOCABULARY)):
            return None
        sizes = self.splits.insides[VOCABULARY].sizes
        rows = layout(cut, self.mesh, where=VOCABULARY, **{n: sizes[n] for n in cut.names})
        over = spec_axes(self.tokens, self.mesh)
        return Vocabulary(rows, axes, tuple(a for a in axes if a in over), self.mesh)

    @cached_property
    def _programs(self) -> dict[str, tuple[Program, Program]]:
        """How each inside that a split cuts is entered and left."""
        tokens = {"vision": self.patches, "text": self.tokens}
        return {
            kind: self.splits.doors(tokens[inside.site], kind)
            for kind, inside in self.splits.insides.items()
            if self.splits.axes(kind) and not inside.by_index
        }

    @property
    def hosted(self) -> list[str]:
        """The insides to whose parts, dealt whole, rows travel: experts."""
        insides = self.splits.insides.items()
        return [k for k, v in insides if v.by_index and v.dealt and self.splits.axes(k)]

    @cached_property
    def hosts(self) -> dict[str, Hosts]:
        """Who holds which parts of them, of the ranks that this one's rows can visit."""
        return {kind: self._hosts(kind) for kind in self.hosted}

    def _hosts(self, kind: str) -> Hosts:
        mesh, inside, here = self.mesh, self.splits.insides[kind], self.mesh.here
        (name,) = inside.dims
        cut = layout(self.splits.specs[name], mesh, where=name, **_sizes_of(inside, name))
        travel, same = self.splits.travelling(self.tokens, kind)
        peers = list(mesh.peers(travel, here))
        held = [cut.indices(rank)[0] for rank in peers]
        group, beside = (
            mesh.group(axes) if mesh.span(axes) > 1 and not mesh.imagined else None
            for axes in (travel, same)
        )
        return Hosts(held, cut.shape[0], peers.index(here), group, beside)

    @cached_property
    def gathering(self) -> frozenset[str]:
        """The insides that gather tokens on the way in."""
        return frozenset(kind for kind, (into, _) in self._programs.items() if into.steps)

    @cached_property
    def parts(self) -> Parts:
        """The parameters that splits cut for compute."""
        return Parts(self.splits.layouts, self.mesh)

    @cached_property
    def fused(self) -> FusedDims:
        """The parameters with a dim that is several factors, such as queries, keys and values."""
        return fused_parameters(self.config)

    @cached_property
    def stored(self) -> Mapping[str, StoredParameter]:
        """How each parameter is stored, by name."""
        shapes = self.config.parameter_shapes()
        return stored_parameters(shapes, self.storages, self.mesh, self.parts)

    def counts(self, name: str) -> bool:
        """Whether this rank is the one, of all that hold the same elements, that counts them."""
        return counts_here(self.stored[name], self.mesh, self.mesh.here)

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
            lengths = header.table.tokens.tolist()
            pack = Packing(lengths, home=header.home, homes=self.data_ranks)
            return layout(self.tokens, self.mesh, where=TOKENS, smp=pack, m=1)
        rows = Packing([1] * len(header.samples), home=header.home, homes=self.data_ranks)
        length = self._padded(header)
        return layout(self.tokens, self.mesh, where=TOKENS, b=rows, s=length, m=1)

    def _padded(self, header: StepHeader) -> int:
        """Positions for which every sample has room; a pack needs no padding."""
        return max(-(-header.longest // self.divisor), 1) * self.divisor

    def row_counts(self, header: StepHeader) -> tuple[IntArray, IntArray]:
        """What each rank pushes through the model; the same on every rank.

        Args:
          header: the micro-batch.
        Returns: patches, and positions of tokens, padding included: one number a rank.
        """
        where = self.layouts(header)
        *dims, _ = range(len(where.tokens.bound))
        tokens = [where.tokens.loads(dim) for dim in dims]
        return tuple(
            np.prod(loads, axis=0).astype(np.int64) for loads in ([where.patches.loads()], tokens)
        )

    def describe_deal(self, header: StepHeader) -> str:
        """Who gets which patches of a micro-batch, and how evenly, beside leaving them at home.

        Args:
          header: the micro-batch, the same on every rank.
        Returns: one line per rank, or several ranks that get as much, those with least work last
          where they are many; and the largest load over an even share of the work, before and
          after; frames that several ranks encode count once in it.
        """
        dealt = self.layouts(header).patches
        read = "@" + self.mesh.text(self.data_axes) + ".home" if self.data_axes else ""
        home = layout(f"(img{read} s) c", self.mesh, where=None, **dealt.sizes)
        rows, costs = dealt.loads(), dealt.loads(by="cost")
        work = layout("(img s) c", self.mesh, where=None, **dealt.sizes).loads(by="cost")[0]
        even = max(work / self.mesh.size, 1e-300)
        lines = [f"{len(header.segments)} frames, {sum(header.segments):,} patches"]
        lines += deal_lines(rows, costs / even)
        before, after = (where.loads(by="cost").max() / even for where in (home, dealt))
        lines.append(f"  largest share {after:.2f}; where they are read {before:.2f}")
        return "\n".join(lines)

    def share(self, header: StepHeader, rank: int) -> Share:
        """What a rank holds of a micro-batch; no ranks need to run."""
        return self._share(header, self.layouts(header), rank)

    def _share(self, header: StepHeader, where: StepLayouts, rank: int) -> Share:
        samples, positions = token_places(where.tokens, rank)
        patches, _ = where.patches.indices(rank)
        seen, read = self._entered(where.patches, "vision"), self._entered(where.tokens, "text")
        return Share(
            patches,
            samples,
            positions,
            header.visual,
            self.copies,
            entered_patches=None if seen is where.patches else seen.indices(rank)[0],
            entered_tokens=None if read is where.tokens else token_places(read, rank),
        )

    def _entered(self, tokens: Layout, site: str) -> Layout:
        """Layout of the tokens that a site's attention computes on."""
        inside = self.splits.attention(site)
        if inside not in self._programs:
            return tokens
        entered = self.splits.entered(tokens.spec, inside)
        same = entered == tokens.spec
        return tokens if same else layout(entered, self.mesh, where=inside, **tokens.sizes)

    def _doors(self, where: StepLayouts) -> dict[str, Door | Regathered]:
        """The ways into the insides that splits cut, and out of them."""
        doors: dict[str, Door | Regathered] = {}
        for kind, programs in self._programs.items():
            inside = self.splits.insides[kind]
            tokens = where.patches if inside.site == "vision" else where.tokens
            width = spec(str(tokens.spec.dims[-1])).names[0]
            sizes = {**tokens.sizes, width: inside.sizes[width]}
            one_row = inside.site == "text" and is_packed(self.tokens)
            door = make_door(programs, self.mesh, sizes, one_row=one_row)
            again = inside.site in self.regather and kind in self.gathering
            doors[kind] = Regathered(door) if again else door
        return doors

    def seen_from(self, rank: int) -> "BoundPlan":
        """The plan as one of its ranks has it, which need not run; see ``Mesh.seen_from``."""
        return replace(self, mesh=self.mesh.seen_from(rank))

    def exchange(self, tokens: TokenIds) -> ToldIds | None:
        """Tell the ranks that share the vocabulary what this rank's tokens ask for, on the host.

        Where it is cut every rank calls this alike, once a micro-batch, from one thread.

        Args:
          tokens: of a micro-batch: those that ``share`` gives this rank.
        Returns: for ``step``; None where the vocabulary is whole.
        """
        return self.vocabulary.exchange(tokens) if self.vocabulary else None

    def step(self, header: StepHeader, vocab: ToldIds | None = None) -> StepBoundaries:
        """Plan one micro-batch: what this rank holds of it, and what moves where.

        Args:
          header: the micro-batch, the same on every rank.
          vocab: what ``exchange`` gave, where a split cuts the vocabulary; without it nothing can
            be looked up.
        """
        mesh, modes = self.mesh, self.attention
        where = self.layouts(header)
        sites = {"vision": self._vision(header, where), "text": self._text(header, where)}
        placeholders = Placeholders.of(header, self.config.unit)
        return StepBoundaries(
            share=self._share(header, where, mesh.here),
            schedules={
                name: schedule(site, modes.get(name), self.kernel) for name, site in sites.items()
            },
            merged=hand_off(where.merged, where.tokens, placeholders, self.hand_off_axes, mesh),
            doors=self._doors(where),
            vocabulary=self.vocabulary.plan(vocab) if self.vocabulary and vocab else None,
            shared_vocabulary=self.vocabulary is not None,
            hosts=self.hosts,
            mesh=mesh,
        )

    def _vision(self, header: StepHeader, where: StepLayouts) -> Site:
        """Patches: every row of a frame sees all of it."""
        heads = self.splits.heads("vision", self.config.heads["vision"])
        rows = self._entered(where.patches, "vision")
        lengths = header.table.frames.prod(axis=1)
        return Site(self.mesh, rows, lengths, causal=False, heads=heads)

    def _text(self, header: StepHeader, where: StepLayouts) -> Site:
        """Tokens: each sees those before it of its sample; a pack is one row of a batch."""
        packed = is_packed(self.tokens)
        lengths = header.table.tokens
        if not packed:
            lengths = np.full_like(lengths, self._padded(header))
        heads = self.splits.heads("text", self.config.heads["text"])
        rows = self._entered(where.tokens, "text")
        return Site(self.mesh, rows, lengths, causal=True, heads=heads, one_row=packed)


def _sizes_of(inside: Inside, name: str) -> dict[str, int]:
    """Sizes of the inner dims that one split cuts."""
    return {dim: inside.sizes[dim] for dim in spec(inside.dims[name]).names}


def _storage_facts(storages: Mapping[str, Storage]) -> dict[str, str]:
    """Which units are stored in each way."""
    units: dict[str, list[str]] = {}
    for unit, how in storages.items():
        units.setdefault(f"stored as {how}", []).append(unit or "the root")
    return {how: f"{len(held)} units, {' '.join(held)}" for how, held in units.items()}
