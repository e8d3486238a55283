"""Decoder split over tp, its tokens cut over cp and tp; vision cut over the same four ranks."""

from plans.decoder_parallel import tensor_parallel
from vlshard import Mesh, Plan, fsdp, gather, ulysses


def plan(world: int) -> Plan:
    """Four ranks share each sample; the world's size scales the data-parallel axis."""
    return Plan(
        mesh=Mesh(dp=world // 4, cp=2, tp=2),
        params={"**": fsdp("dp cp tp")},
        layouts={
            "vision.patches": "(img@dp.home s)@cp@tp c",
            "text.tokens": "b@dp.home s@cp.zigzag@tp m",
        },
        splits=tensor_parallel("tp"),
        attention={"vision": ulysses("cp tp"), "text": gather("cp")},
    )
