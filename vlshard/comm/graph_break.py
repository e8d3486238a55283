"""Keeps ``torch.compile`` out of functions that plan on the host and communicate."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function as one that Dynamo calls but does not look into: a graph break.

    What serves this in torch imports all of Dynamo, so it is asked for only once Dynamo traces.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return cast("Callable[P, R]", torch.compiler.disable(function))(*args, **kwargs)
        return function(*args, **kwargs)

    return call
