"""Arrays of integers: global rows, counts and ranks."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
