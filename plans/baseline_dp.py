"""Data parallel: each rank computes the samples that it reads; all parameters sharded over all."""

from vlshard import Mesh, Plan, fsdp


def plan(world: int) -> Plan:
    """One data-parallel axis over all ranks."""
    return Plan(
        mesh=Mesh(dp=world),
        params={"**": fsdp("dp")},
        layouts={"vision.patches": "(img@dp.home s) c", "text.tokens": "b@dp.home s m"},
    )
