"""Data parallel, with the vision encoder copied to every rank and only the decoder sharded."""

from vlshard import Mesh, Plan, fsdp, replicate


def plan(world: int) -> Plan:
    """One data-parallel axis over all ranks; vision parameters are never gathered."""
    return Plan(
        mesh=Mesh(dp=world),
        params={"model.visual.**": replicate(), "**": fsdp("dp")},
        layouts={"vision.patches": "(img@dp.home s) c", "text.tokens": "b@dp.home s m"},
    )
