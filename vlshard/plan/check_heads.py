"""Whether each rank has the key heads of its query heads; in words of the model and the plan."""

from collections.abc import Iterator, Mapping

from vlshard.language import Name, PlanError, ShardError, Span, spec
from vlshard.plan.inside import Inside
from vlshard.plan.place import Place
from vlshard.plan.splits import Splits


def deal_fix(inside: Inside, split: str, dim: Name, ranks: int) -> str:
    """Over how many ranks a dim can be cut, and how fewer key heads than ranks are.

    Args:
      inside: what has the dim.
      split: the name under which the plan cuts it.
      dim: as the plan writes it.
      ranks: over so many, which do not divide it.
    """
    size = inside.sizes[dim.name]
    works = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
    axes = [str(axis) for cut in dim.splits for axis in cut.axes]
    keys = [*inside.dims].index(split) == 1
    if not keys or ranks % size or len(axes) > 1 or "." in axes[0]:
        return f"fix: degrees {works} work"
    if size == 1:
        return f"fix: {inside.dims[split]}, whole: every rank computes the one key head"
    parts = f"{axes[0]}=({size}, {ranks // size})"
    return f"fix: degrees {works} work; on Mesh({parts}), {dim.name}@{axes[0]}.0"


def check_heads(
    derived: Splits, inside: Inside, given: Mapping[str, str], source: str
) -> Iterator[ShardError]:
    """Each rank has the key heads of its query heads.

    Args:
      derived: the plan's splits.
      inside: attention whose key heads are cut for themselves.
      given: the plan's splits as it writes them.
      source: of the plan.
    """
    q_name, kv_name = inside.dims
    q, kv = (inside.sizes[spec(dims).names[0]] for dims in inside.dims.values())
    if q_name not in given and kv_name not in given:
        return
    missing = next((name for name in (q_name, kv_name) if name not in given), None)
    if missing and not (missing == kv_name and kv == 1):
        other = kv_name if missing == q_name else q_name
        yield PlanError(
            f"{other} is split and {missing} is not: a rank's query heads must meet their keys",
            where=f"{source} splits",
            notes=[f"fix: name both; {_offer(derived, inside)}"],
        )
        return
    over_q, over_kv = derived.degrees(inside.site)
    first, second = _cuts(derived, inside)
    if first[: len(second)] == second and (over_q == over_kv or kv == over_kv):
        return
    text = given.get(kv_name, given.get(q_name, ""))
    yield PlanError(
        f"{q} query heads over {over_q} ranks do not meet {kv} key heads over {over_kv}",
        text=text,
        spans=[Span(0, len(text))],
        where=Place(source, kv_name if kv_name in given else q_name).of(text),
        notes=[f"fix: {_offer(derived, inside)}"],
    )


def _cuts(derived: Splits, inside: Inside) -> list[list[str]]:
    """Parts of the mesh that cut query heads, and that cut key heads."""
    cuts = derived.cuts(derived.attention(inside.site) or "")
    names = [spec(dims).names[0] for dims in inside.dims.values()]
    return [
        [p for s in cuts.get(name, ()) for axis in s.axes for p in derived.mesh.axis_parts(axis)]
        for name in names
    ]


def _offer(derived: Splits, inside: Inside) -> str:
    """How key heads can be cut where query heads are cut as they are."""
    (q_dim, kv_dim), (_, whole) = (
        [spec(dims).names[0] for dims in inside.dims.values()],
        inside.dims.values(),
    )
    q, kv, mesh = inside.sizes[q_dim], inside.sizes[kv_dim], derived.mesh
    parts, _ = _cuts(derived, inside)
    degree, meets = mesh.span(parts), "each rank then has the key head of its query heads"
    if kv % degree == 0:
        return f"{kv_dim} over the same axes as {q_dim}"
    if kv == 1:
        return f"{whole}, whole: {meets}"
    for n in range(1, len(parts)):
        if mesh.span(parts[:n]) == kv:
            return f"{kv_dim}@{mesh.text(parts[:n])}: {meets}"
    if degree % kv == 0 and len(parts) == 1 and "." not in parts[0]:
        (axis,) = parts
        return f"{kv_dim}@{axis}.0 on Mesh({axis}=({kv}, {degree // kv})): {meets}"
    works = [str(n) for n in range(1, q + 1) if q % n == 0 and (kv % n == 0 or n % kv == 0)]
    return f"degrees {', '.join(works)} work for {q} query heads and {kv} key heads"
