"""What the transport does, written down: messages, launches and waits, with random delays."""

import random
import sys
import time
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from vlshard.comm import transport


@contextmanager
def recorded(delay=0.0):
    """Launches and waits in their order, each after a random delay of up to so many seconds."""
    events, draw = [], random.Random(dist.get_rank())
    launch, wait = transport.launch, transport.Flight.wait

    def launched(*args):
        time.sleep(delay * draw.random())
        events.append("launch")
        return launch(*args)

    def waited(flight):
        time.sleep(delay * draw.random())
        events.append("wait")
        return wait(flight)

    transport.launch, transport.Flight.wait = launched, waited
    try:
        yield events
    finally:
        transport.launch, transport.Flight.wait = launch, wait


@contextmanager
def messages():
    """Number of elements of each message that this rank sends."""
    sizes, post = [], transport.post

    def posted(outgoing, incoming, *group):
        sizes.extend(x.numel() for _, x in outgoing if x.numel())
        return post(outgoing, incoming, *group)

    transport.post = posted
    try:
        yield sizes
    finally:
        transport.post = post


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_single", "all_gather_object"),
    *("all_gather_into_tensor", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "barrier"),
    *("batch_isend_irecv", "send", "recv", "reduce", "gather", "scatter", "gather_object"),
)


class Call(NamedTuple):
    """A call of a collective: its name and the module that called, elements, ranks."""

    made: tuple[str, str]
    elements: int
    ranks: int


@contextmanager
def collectives():
    """Calls of torch's collectives, in their order."""
    calls, known = [], {name: getattr(dist, name) for name in COLLECTIVES}

    def noted(name):
        def call(*args, **kwargs):
            elements = next((x.numel() for x in args if isinstance(x, torch.Tensor)), 0)
            caller = sys._getframe(1).f_globals["__name__"]
            calls.append(Call((name, caller), elements, dist.get_world_size(kwargs.get("group"))))
            return known[name](*args, **kwargs)

        return call

    for name in known:
        setattr(dist, name, noted(name))
    try:
        yield calls
    finally:
        for name, function in known.items():
            setattr(dist, name, function)
