"""Data parallel, experts dealt to all ranks: tokens travel to them; FSDP for everything else."""

from plans.decoder_parallel import expert_parallel
from vlshard import Mesh, Plan, fsdp


def plan(world: int) -> Plan:
    """Every rank reads its own samples and holds its part of the experts, without copies."""
    return Plan(
        mesh=Mesh(dp=world),
        params={"**": fsdp("dp")},
        layouts={"vision.patches": "(img@dp.home s) c", "text.tokens": "b@dp.home s m"},
        splits=expert_parallel("dp"),
    )
