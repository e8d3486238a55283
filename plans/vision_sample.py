"""A sample configuration: the vision half by four settings, the decoder beside it.

dp_shard        1: a copy of the vision parameters on every rank; None: stored as everything else;
                any other number: sharded over that many neighbouring ranks, copied to the others
cp              ranks that share the patches of a sample's images
ulysses_degree  1: keys and values are fetched; cp: all-to-all from tokens to heads and back; in
                between: all-to-all inside, fetching outside
async_cp        True: what attention needs travels while the next projection runs
"""

from plans.vision_parallel import vision_parallel
from vlshard import Plan, gather, replicate

VISION = vision_parallel(dp_shard=1, cp=2, ulysses_degree=1, async_cp=False)


def plan(world: int) -> Plan:
    """Two ranks share each sample; the decoder's parameters are copied too."""
    return Plan(
        mesh=VISION.mesh(world),
        params={**VISION.params(world), "**": replicate()},
        layouts={**VISION.layouts, "text.tokens": "b@dp.home s@cp.zigzag m"},
        attention={**VISION.attention, "text": gather("cp")},
    )
