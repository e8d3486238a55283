"""Remarks on what a plan says of the insides of blocks without any effect."""

from collections.abc import Iterator

from vlshard.plan.bound_plan import BoundPlan
from vlshard.plan.model_config import SITES, VOCABULARY


def split_remarks(bound: BoundPlan) -> Iterator[str]:
    """What a plan's splits say that is easily overlooked.

    Splits that cut no parameter, sites that gather nothing that could be gathered again, and up to
    how many labelled tokens a shared vocabulary sends less than its gathered tables would be.

    Args:
      bound: a plan, bound to a model.
    Returns: one line for each.
    """
    splits = bound.splits
    for kind, inside in splits.insides.items():
        cut = [name for name in inside.dims if name in splits.specs and splits.specs[name].axes]
        if cut and not any(name in splits.layouts for name in inside.parameters):
            names = " and ".join(cut)
            yield f"{names} cuts nothing: no layer of this model has a parameter of {kind}"
    gathering = {splits.insides[kind].site for kind in bound.gathering}
    for site in bound.regather:
        if site not in gathering:
            yield f"regather of {site}: no split of its blocks gathers {SITES[site]} on the way in"
    if bound.vocabulary:
        rows, over = bound.vocabulary.rows.shape[0], bound.vocabulary.axes
        ranks = bound.mesh.span(over)
        yield (
            f"{VOCABULARY} of {rows:,} over {bound.mesh.text(over)}={ranks}: with more than "
            f"{rows // ranks:,} labelled tokens a rank it is cheaper to gather the tables"
        )
