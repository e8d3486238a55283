"""Decoder split over tp, tokens cut over it between blocks; vision data parallel over all ranks."""

from plans.decoder_parallel import tensor_parallel
from vlshard import Mesh, Plan, fsdp


def plan(world: int) -> Plan:
    """Pairs of ranks share a decoder; the world's size scales the data-parallel axis."""
    return Plan(
        mesh=Mesh(dp=world // 2, tp=2),
        params={"**": fsdp("dp tp")},
        layouts={
            "vision.patches": "(img@dp.home@tp.balance s) c",
            "text.tokens": "b@dp.home s@tp m",
        },
        splits=tensor_parallel("tp"),
    )
