"""What follows from a plan's splits: how parameters are cut, and what entering a block undoes.

A split is the layout of the inner dims of a block: ``text.q: h@tp d``. A parameter with a dim of
that name is cut alike, so that each rank computes its part of the inner dim from all tokens of the
group: tokens that are cut over the split's axes are gathered on the way in (``enter``), and what
comes out is a term of a sum over these axes, which ``leave`` carries out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from vlshard.attention import Heads
from vlshard.language import (
    Dim,
    Group,
    Layout,
    MeshShape,
    Name,
    Spec,
    Split,
    layout,
    names_in,
    spec,
    spec_axes,
    splits_in,
    without_axes,
)
from vlshard.plan.inside import HasInsides, Inside
from vlshard.programs import Program, transition

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Splits:
    """A plan's splits, without faults, on a model's insides.

    Attributes:
      insides: by name.
      specs: layout of inner dims by the name under which the plan gives it.
      mesh: the ranks.
    """

    insides: Mapping[str, Inside]
    specs: Mapping[str, Spec]
    mesh: MeshShape

    def cuts(self, inside: str) -> dict[str, tuple[Split, ...]]:
        """The splits of each inner dim of an inside that is cut."""
        names = (name for name in self.insides[inside].dims if name in self.specs)
        dims = (dim for name in names for dim in self.specs[name].dims)
        return {n.name: n.splits for dim in dims for n in names_in(dim) if n.splits}

    def axes(self, inside: str) -> tuple[str, ...]:
        """Parts of the mesh that cut an inside, in their order; empty if it is whole."""
        splits = [split for cuts in self.cuts(inside).values() for split in cuts]
        parts = (p for s in splits for axis in s.axes for p in self.mesh.axis_parts(axis))
        return tuple(dict.fromkeys(parts))

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Layout of each parameter that a split cuts, by name; the others are whole."""
        return {
            name: layout(cut, self.mesh, where=name, **_sizes(cut, inside))
            for kind, inside in self.insides.items()
            if (cuts := self.cuts(kind))
            for name, dims in inside.parameters.items()
            if (cut := _with_splits(spec(dims), cuts)).axes
        }

    def entered(self, tokens: Spec, inside: str) -> Spec:
        """Layout of the tokens that an inside computes on."""
        axes = self.axes(inside)
        dims = (without_axes(dim, axes, self.mesh) for dim in tokens.dims)
        return spec(" ".join(map(str, dims)))

    def left(self, tokens: Spec, inside: str) -> Spec:
        """Layout of what comes out of an inside: terms of a sum over the axes that cut it."""
        return spec(f"{self.entered(tokens, inside)} + {' '.join(self.axes(inside))}")

    def doors(self, tokens: Spec, inside: str) -> tuple[Program, Program]:
        """The programs by which an inside is entered and left."""
        entered, left = self.entered(tokens, inside), self.left(tokens, inside)
        sides = (str(tokens), str(entered)), (str(left), str(tokens))
        enter, leave = (transition(*pair, self.mesh) for pair in sides)
        return enter, leave

    def travelling(self, tokens: Spec, inside: str) -> tuple[Axes, Axes]:
        """Parts of the mesh that cut an inside into which rows travel by index.

        Returns: those that cut the tokens too, over which rows travel, and those that do not, over
          which ranks have the same rows; in mesh order.
        """
        cutting, of_tokens = set(self.axes(inside)), set(spec_axes(tokens, self.mesh))
        both = tuple(p for p in self.mesh.parts if p in cutting & of_tokens)
        return both, tuple(p for p in self.mesh.parts if p in cutting - of_tokens)

    def heads(self, site: str, heads: Heads) -> Heads:
        """The heads that a rank computes at an attention site."""
        q, kv, width = heads
        over_q, over_kv = self.degrees(site)
        return Heads(q // over_q, kv // over_kv, width)

    def degrees(self, site: str) -> tuple[int, int]:
        """Ranks over which query heads and key heads of a site are cut."""
        inside = self.attention(site)
        if inside is None:
            return 1, 1
        cuts = self.cuts(inside)
        names = [spec(dims).names[0] for dims in self.insides[inside].dims.values()]
        ranks = [self._ranks(cuts.get(name, ())) for name in names]
        return ranks[0], ranks[-1]

    def attention(self, site: str) -> str | None:
        """The inside that is the attention of a site."""
        name = f"{site}.attention"
        return name if name in self.insides else None

    def _ranks(self, splits: tuple[Split, ...]) -> int:
        """Ranks that splits deal to."""
        return self.mesh.span([str(axis) for split in splits for axis in split.axes])


def derive(splits: Mapping[str, str], mesh: MeshShape, config: object) -> Splits:
    """The splits of a plan on the insides of a model; a model without any has none to split."""
    insides: Mapping[str, Inside] = config.insides() if isinstance(config, HasInsides) else {}
    return Splits(insides, {name: spec(text) for name, text in splits.items()}, mesh)


def _with_splits(of: Spec, cuts: Mapping[str, tuple[Split, ...]]) -> Spec:
    """The spec with each dim of a name cut as that name is."""
    dims = " ".join(_cut(dim, cuts) for dim in of.dims)
    return spec(dims)


def _cut(dim: Dim, cuts: Mapping[str, tuple[Split, ...]]) -> str:
    """A dim in the language, with the splits of each name in it."""
    if isinstance(dim, Group):
        return f"({' '.join(_cut(item, cuts) for item in dim.items)})"
    splits = cuts.get(dim.name, ()) if isinstance(dim, Name) else ()
    return str(dim) + "".join(map(str, splits))


def _sizes(of: Spec, inside: Inside) -> dict[str, int]:
    """Sizes of the names of a parameter's spec."""
    return {name: inside.sizes[name] for name in of.names}


def trailing(dim: Dim, axes: tuple[str, ...], mesh: MeshShape) -> tuple[list[Split], list[Split]]:
    """The splits of a dim over some axes that cannot be undone on the way in, and why not.

    Args:
      dim: of a token layout.
      axes: parts of the mesh that cut an inside.
      mesh: the ranks.
    Returns: splits that join such an axis with another, and splits behind which another comes.
    """
    wanted, joined, early = set(axes), list[Split](), list[Split]()
    seen: list[Split] = []
    for split in splits_in(dim):
        parts = {part for axis in split.axes for part in mesh.axis_parts(axis)}
        if parts & wanted and not parts <= wanted:
            joined.append(split)
        elif parts <= wanted:
            seen.append(split)
        elif seen:
            early += seen
            seen = []
    return joined, early
