"""Decoder split over tp, experts over cp and tp, one vocabulary a tp group; vision on all four."""

from plans.decoder_parallel import expert_parallel, tensor_parallel
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
        splits={**tensor_parallel("tp"), **expert_parallel("cp tp"), "text.vocab": "vocab@tp"},
        attention={"vision": ulysses("cp tp"), "text": gather("cp")},
    )
