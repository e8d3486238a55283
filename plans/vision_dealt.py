"""Whole images dealt to all ranks so that attention costs each the same; nothing to communicate."""

from vlshard import Mesh, Plan, fsdp, gather, replicate


def plan(world: int) -> Plan:
    """Two ranks share each sample's tokens; images go to whoever has least to do."""
    return Plan(
        mesh=Mesh(dp=world // 2, cp=2),
        params={"model.visual.**": replicate(), "**": fsdp("dp cp")},
        layouts={
            "vision.patches": "(img@(dp cp).balance s) c",
            "text.tokens": "b@dp.home s@cp.zigzag m",
        },
        attention={"text": gather("cp")},
    )
