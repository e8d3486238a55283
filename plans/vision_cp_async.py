"""As vision_cp_colossal, with keys and values travelling while the next projection runs."""

from vlshard import Mesh, Plan, fsdp, gather, replicate


def plan(world: int) -> Plan:
    """Two ranks share each sample; the world's size scales the data-parallel axis."""
    return Plan(
        mesh=Mesh(dp=world // 2, cp=2),
        params={"model.visual.**": replicate(), "**": fsdp("dp cp")},
        layouts={
            "vision.patches": "(img@dp.home s)@cp c",
            "text.tokens": "b@dp.home s@cp.zigzag m",
        },
        attention={"vision": gather("cp", overlap=True), "text": gather("cp")},
    )
