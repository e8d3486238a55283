"""What any program must send at least: a bound from what ranks hold and want, whatever the steps.

It counts messages of one element. Without a sum each rank that wants an element and does not hold
it gets one. The T terms of a sum, of which W ranks want the result, meet in T - 1 messages and go
out in W - 1; in one more if none of the W holds a term. A rank sends the mean of all at least.
"""

from math import prod

import numpy as np

from vlshard.language import IntArray, Layout, kept

SAFE = 2**62


def least_sent(src: Layout, dst: Layout) -> int:
    """Elements that the rank which sends most must send, at least.

    Args:
      src: what ranks hold.
      dst: what they want, on the same mesh.
    Returns: the sum of messages over the ranks of the axes that the sides name, rounded up; axes
      over which both sides leave a sum pending do not count.
    """
    ranks = {part: n for part, n in src.mesh.parts.items() if n > 1}
    have, want = ({axis for dim in side.bound for axis in dim.axes} for side in (src, dst))
    pending, left = ({*src.mesh.expand([*map(str, side.spec.pending)])} for side in (src, dst))
    named = [part for part in ranks if part in (have | want | pending) - left]
    size = prod(src.shape)
    each = prod(ranks[part] for part in named)
    terms = prod(ranks[part] for part in named if part in pending)
    wanting = prod(ranks[part] for part in named if part not in want)
    alike = prod(ranks[part] for part in named if part not in have | want)
    # Elements at ranks that hold a term of them and want them.
    both = _both(src, dst) // prod(n for part, n in ranks.items() if part not in named)
    if terms > 1:
        messages = size * (terms + wanting - 2) + size - both // alike
    else:
        messages = size * wanting - both
    return -(-messages // each)


def _both(src: Layout, dst: Layout) -> int:
    """Elements that ranks hold and want, summed over the ranks of the mesh."""
    ranks = src.mesh.parts
    room = prod(src.shape) * src.mesh.size <= SAFE
    found: IntArray = np.ones((), np.int64 if room else object)
    for one, other in zip(src.bound, dst.bound, strict=True):
        found = found * np.asarray(kept(one, other, ranks), found.dtype)
    wide = [n for n in ranks.values() if n > 1]
    shape = np.broadcast_shapes(found.shape, (1,) * len(wide))
    alike = prod(n for n, extent in zip(wide, shape, strict=True) if extent == 1)
    return int(found.sum()) * alike
