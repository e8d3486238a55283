"""What the transport does, written down: messages, launches and waits, with random delays."""

import random
import time
from contextlib import contextmanager

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
