"""Data parallel, one vocabulary for all ranks: each holds its part of the tables, and no copy."""

from vlshard import Mesh, Plan, replicate


def plan(world: int) -> Plan:
    """Every rank reads its own samples; rows of the tables and labelled rows travel instead."""
    return Plan(
        mesh=Mesh(dp=world),
        params={"**": replicate()},
        layouts={"vision.patches": "(img@dp.home s) c", "text.tokens": "b@dp.home s m"},
        splits={"text.vocab": "vocab@dp"},
    )
