"""Vision cut over four ranks: all-to-all inside pairs, keys and values going round outside."""

from vlshard import Mesh, Plan, fsdp, gather, hybrid, replicate


def plan(world: int) -> Plan:
    """Four ranks share each sample; the world's size scales the data-parallel axis."""
    return Plan(
        mesh=Mesh(dp=world // 4, cp={"ring": 2, "ulysses": 2}),
        params={"model.visual.**": replicate(), "**": fsdp("dp cp")},
        layouts={
            "vision.patches": "(img@dp.home s)@cp c",
            "text.tokens": "b@dp.home s@cp.zigzag m",
        },
        attention={
            "vision": hybrid(ring="cp.ring", ulysses="cp.ulysses"),
            "text": gather("cp"),
        },
    )
