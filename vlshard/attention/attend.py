"""Attention of local queries, keys and values in one call, in any model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from jaxtyping import Float
from torch import Tensor

from vlshard.attention.check_mode import SiteWords, check_mode, check_rows
from vlshard.attention.modes import Heads, Mode
from vlshard.attention.schedule import Schedule, Site, schedule
from vlshard.comm import Mesh, SameMesh, even_sizes, running_mesh, untraced
from vlshard.language import (
    Binder,
    Int,
    Layout,
    LayoutError,
    Packed,
    Packing,
    ShardError,
    layout,
    refuse_shape,
    spec,
)

WORDS = SiteWords("attention", "the sequence", "MODE", None, None)


@untraced
def attend(
    q: Float[Tensor, "... h d"],
    k: Float[Tensor, "... kv d"],
    v: Float[Tensor, "... kv d"],
    text: str,
    mesh: Mesh,
    mode: Mode | None = None,
    /,
    *,
    causal: bool = False,
    **sizes: int | Packing,
) -> Float[Tensor, "... h d"]:
    """Attention over sequences that are cut over ranks: softmax(q k / sqrt(d)) v.

    Every rank calls this alike, with its own part; the result and the gradients are those of
    attention to whole sequences. The last dim before the heads is the sequence, and each index of
    the dims before it has one of its own. Where the last dim is a pack, ``(smp s)``, each segment
    is a sequence. Heads may be split over axes that the mode does not use (``h@tp``): each rank
    attends with those it has.

    Args:
      q: this rank's queries.
      k: its keys: the same positions, and as many heads or a divisor of them.
      v: its values, of the keys' shape.
      text: layout of the queries, such as ``b@dp s@cp.zigzag h d`` or ``(smp s)@cp h d``.
      mesh: the axes, and the ranks along them.
      mode: how keys come to the queries that see them: ``ulysses``, ``gather``, ``ring`` or
        ``hybrid`` over the axes that cut sequences; None where none is cut.
      causal: a query sees its own position and those before it.
      sizes: global size or packing of dims, by name, as for ``reshard``.
    Returns: one row per query, in the layout and dtype of q.
    Raises: SpecError if the layout cannot be read; LayoutError if it does not fit the mesh, the
      sizes or the tensors; PlanError if the mode does not fit the layout or the heads, or if ranks
      have to communicate and there is no process group.
    """
    if not k.shape == v.shape or not _go_together(q.shape, k.shape):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        note = "k and v have the positions and the head width of q, and q's heads or a divisor"
        raise LayoutError(f"{shapes} do not go together", text=text, notes=[note])
    heads = Heads(q.shape[-2], k.shape[-2], q.shape[-1])
    same, binder = SameMesh(running_mesh(mesh)), Binder(spec(text).expand(q.ndim), mesh, None)
    items = tuple((name, binder.size(name, size)) for name, size in sizes.items())
    plan = _planned(text, tuple(q.shape), heads, same, mode, causal, items)
    moves = ((k, plan.kv), (v, plan.kv), (q, plan.q))
    if plan.overlap:
        flying = [move.start(x.flatten(0, -3)) for x, move in moves]
        key, value, query = (pending.wait() for pending in flying)
    else:
        key, value, query = (move(x.flatten(0, -3)) for x, move in moves)
    return plan.attend(query, key, value)


def _go_together(q: Sequence[int], k: Sequence[int]) -> bool:
    """Whether keys have the positions and width of queries, and heads that divide theirs."""
    same = len(q) >= 3 and [*q[:-2], q[-1]] == [*k[:-2], k[-1]]
    return same and k[-2] > 0 and q[-2] % k[-2] == 0


# Each holds an index for every row that moves, so few are kept where sizes change with the step.
@lru_cache(maxsize=128)
def _planned(
    text: str,
    shape: tuple[int, ...],
    heads: Heads,
    same: SameMesh,
    mode: Mode | None,
    causal: bool,
    items: tuple[tuple[str, int | Packing], ...],
) -> Schedule:
    """How attention is met; planned once for each mesh, local shape and sizes."""
    mesh, parsed = same.mesh, spec(text).expand(len(shape))
    bound = layout(parsed, mesh, where=None, **{**even_sizes(parsed, mesh, shape), **dict(items)})
    for fault in _faults(bound, mode, heads, mesh):
        raise fault
    if bound.local_shape(mesh.here) != shape:
        refuse_shape(bound, mesh.here, shape)
    groups = mode.ways.groups if mode else ()
    mesh.make_groups(axes for axes in groups if mesh.span(axes) > 1)
    site = Site(mesh, _rows(bound), _segments(bound), causal, heads, cutting=_cutting(bound))
    return schedule(site, mode)


def _faults(bound: Layout, mode: Mode | None, heads: Heads, mesh: Mesh) -> Iterator[ShardError]:
    """What keeps a mode from meeting a layout."""
    *_, width = bound.bound
    if bound.spec.pending or width.axes:
        spans = [axis.span for axis in bound.spec.pending] or [bound.spec.dims[-1].span]
        note = "rows and heads may be split, and no sum may be pending"
        headline = "attention needs whole queries, keys and values"
        yield LayoutError(headline, text=bound.spec.text, spans=spans, notes=[note])
        return
    if mode:
        yield from check_mode(mode, mesh, None)
    yield from check_rows(_rows(bound).spec, _cutting(bound), mode, heads, mesh, WORDS)


def _cutting(bound: Layout) -> tuple[str, ...]:
    """Parts of the mesh that cut inside segments."""
    *_, sequence, _, _ = bound.bound
    if isinstance(sequence, Packed):
        return tuple(axis for cut in (*sequence.each, *sequence.cuts) for axis in cut.axes)
    return sequence.axes


def _rows(bound: Layout) -> Layout:
    """The layout of the rows alone, of width 1."""
    rows = replace(bound.spec, dims=(*bound.spec.dims[:-2], Int(1)))
    sizes = {name: size for name, size in bound.items if name in rows.names}
    return layout(rows, bound.mesh, where=None, **sizes)


def _segments(bound: Layout) -> tuple[int, ...]:
    """Rows of each sequence, those of each index of the dims before it."""
    *_, sequence, _, _ = bound.bound
    one = sequence.packing.lengths if isinstance(sequence, Packed) else (sequence.size,)
    return one * prod(bound.shape[:-3])
