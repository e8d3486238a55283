"""Runs programs on all ranks at once in numpy, forward and backward, and counts what is sent.

Written apart from the package: a step is its name, its axes and its dims; what it does follows from
who holds which rows before and after it (``oracle``). A message is rows from one rank to another;
the gradient of a message goes back the same way and is summed where the rows came from.
"""

from itertools import product
from typing import NamedTuple

import numpy as np

from tests import oracle


class Message(NamedTuple):
    """Rows that go from one rank to another: where they lie there, and where they go here."""

    sender: int
    receiver: int
    taken: tuple
    put: tuple


class Simulated(NamedTuple):
    """What every rank ends with, and what it sends in each step."""

    results: list
    gradients: list
    forward: list
    backward: list


def axes_in(text):
    return tuple(text.strip("()").split())


def peers_of(axes, mesh, rank):
    """The ranks that differ from one along the axes only, major to minor."""
    place = oracle.place_of(mesh, rank)
    places = product(*(range(mesh[axis]) for axis in axes))
    return [rank_of({**place, **dict(zip(axes, p, strict=True))}, mesh) for p in places]


def rank_of(place, mesh):
    rank = 0
    for axis in mesh:
        rank = rank * mesh[axis] + place[axis]
    return rank


def messages_of(step, src, dst, sizes, mesh):
    """All messages of a step, those of a rank to itself included."""
    name, found = type(step).__name__, []
    axes = sum(map(axes_in, step.axes), ()) if name == "Exchange" else axes_in(step.axis)
    held = [oracle.rows_of(src, sizes, mesh, rank) for rank in range(oracle.count(mesh))]
    wanted = [oracle.rows_of(dst, sizes, mesh, rank) for rank in range(oracle.count(mesh))]
    for rank, want in enumerate(wanted):
        peers = peers_of(axes, mesh, rank)
        if name == "Slice":
            peers = [rank]
        if name == "Exchange":
            peers = [rank, *sorted(peers)]
        taken_rows = set()
        for peer in peers:
            rows = [
                np.array(sorted({*a} & {*b}), int) for a, b in zip(held[peer], want, strict=True)
            ]
            if name == "Exchange":
                (dim,) = (i for i, d in enumerate(src.dims) if oracle.label_of(d) == step.dim)
                rows[dim] = np.array([row for row in rows[dim] if row not in taken_rows], int)
                taken_rows |= {*rows[dim]}
            found.append(Message(peer, rank, positions(held[peer], rows), positions(want, rows)))
    return found


def positions(rows, wanted):
    """Where rows lie among others, per dim."""
    places = [{row: i for i, row in enumerate(own)} for own in rows]
    return tuple(
        np.array([place[row] for row in want], int)
        for place, want in zip(places, wanted, strict=True)
    )


def simulate(program, case, mesh):
    """Run a program on the inputs and gradients of a case."""
    ranks = range(oracle.count(mesh))
    specs = [case.src, *(oracle.read(str(spec)) for spec in program.between), case.dst]
    blocks = [oracle.input_of(case, mesh, rank) for rank in ranks]
    trips, forward = [], []
    for step, src, dst in zip(program.steps, specs, specs[1:], strict=False):
        shapes = [[rows.size for rows in oracle.rows_of(dst, case.sizes, mesh, r)] for r in ranks]
        messages = messages_of(step, src, dst, case.sizes, mesh)
        trips.append((step, messages, [block.shape for block in blocks]))
        forward.append(sent_in(step, messages, blocks, mesh))
        blocks = carried(messages, blocks, shapes)
    gradients, backward = [oracle.seed_of(case, mesh, rank) for rank in ranks], []
    for step, messages, shapes in reversed(trips):
        back = [Message(m.receiver, m.sender, m.put, m.taken) for m in messages]
        backward.append(sent_in(step, back, gradients, mesh))
        gradients = carried(back, gradients, shapes)
    return Simulated(blocks, gradients, forward, backward[::-1])


def carried(messages, blocks, shapes):
    """What the messages add up to."""
    found = [np.zeros(shape) for shape in shapes]
    for message in messages:
        rows = blocks[message.sender][np.ix_(*message.taken)]
        found[message.receiver][np.ix_(*message.put)] += rows
    return found


def sent_in(step, messages, blocks, mesh):
    """Elements that each rank sends; an all-reduce counts as if done well."""
    sent = [0] * len(blocks)
    if type(step).__name__ == "AllReduce":
        n = oracle.ranks_along(axes_in(step.axis), mesh)
        return [-(-2 * (n - 1) * block.size // n) for block in blocks]
    for sender, receiver, taken, _ in messages:
        if sender != receiver:
            sent[sender] += int(np.prod([rows.size for rows in taken]))
    return sent
