"""Vision parameters sharded inside pairs of ranks and copied between them; decoder over all."""

from vlshard import Mesh, Plan, fsdp


def plan(world: int) -> Plan:
    """Neighbouring ranks share the vision parameters; every rank reads rows of its own."""
    return Plan(
        mesh=Mesh(dp={"copy": world // 2, "shard": 2}),
        params={
            "model.visual.**": fsdp("dp.shard", replicate="dp.copy"),
            "**": fsdp("dp"),
        },
        layouts={"vision.patches": "(img@dp.home s) c", "text.tokens": "b@dp.home s m"},
    )
