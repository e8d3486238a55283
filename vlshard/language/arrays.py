"""Arrays of integers: global rows, counts and ranks."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """``start``, ``start + 1``, ... for each of some runs, one after another.

    Args:
      starts: where each run begins.
      counts: how long it is.
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(starts - ends + counts, counts) + np.arange(total)
