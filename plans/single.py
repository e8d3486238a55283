"""Everything in one process: the reference that the other plans equal."""

from vlshard import Mesh, Plan, replicate


def plan(world: int) -> Plan:
    """One rank holds everything; more than one is refused when the plan is bound."""
    return Plan(
        mesh=Mesh(dp=1),
        params={"**": replicate()},
        layouts={"vision.patches": "(img s) c", "text.tokens": "b s m"},
    )
