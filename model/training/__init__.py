"""What a training program is made of, to be imported; `examples/train.py` is its front.

`measure` takes the time that a vision block needs, so that frames can be dealt by it.
"""

from model.training.measure import keep_cost, kept_cost, measure_cost

__all__ = [
    "keep_cost",
    "kept_cost",
    "measure_cost",
]
