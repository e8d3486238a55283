"""Ranks that wait for the same flights in different orders: right values and gradients, both ways.

Each flight carries numbers of its own, so that one that came for another could not pass.
"""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from vlshard import Mesh, reshard, start
from vlshard.comm import transport
from vlshard.comm.transport import Landing

A, B, C = "t@cp h -> t h@cp", "t@cp h -> t h", "t h + cp -> t h"


def term(mesh, i, dtype=torch.float64):
    """A tensor of flight i on this rank; no two elements of all of them are equal."""
    rows = torch.arange(8, dtype=dtype).reshape(2, 4)
    return (rows + 8 * i + 100 * mesh.rank).requires_grad_()


def weights(y, mesh, i):
    return (torch.arange(y.numel(), dtype=y.dtype) + 1000 * i + 10 * mesh.rank).reshape(y.shape)


def loss_of(arrived, mesh):
    return sum((y * weights(y, mesh, i)).sum() for i, y in arrived.items())


def one_by_one(arrows, mesh):
    """What the same moves give when nothing is in the air with anything else."""
    terms = [term(mesh, i) for i in range(len(arrows))]
    arrived = {}
    for i, (x, arrow) in enumerate(zip(terms, arrows, strict=True)):
        arrived[i] = reshard(x, arrow, mesh)
    loss_of(arrived, mesh).backward()
    return [y.detach() for y in arrived.values()], [x.grad for x in terms]


def waited_in(order, arrows, mesh, recompute=False):
    """The same in flight, waited for in this rank's order."""
    terms = [term(mesh, i) for i in range(len(arrows))]

    def block(*terms):
        flights = [start(x, arrow, mesh) for x, arrow in zip(terms, arrows, strict=True)]
        arrived = {i: flights[i].wait() for i in order}
        return tuple(arrived[i] for i in range(len(arrows)))

    call = partial(checkpoint, block, use_reentrant=False, early_stop=False) if recompute else block
    arrived = call(*terms)
    loss_of(dict(enumerate(arrived)), mesh).backward()
    return [y.detach() for y in arrived], [x.grad for x in terms]


def orders(world, count):
    """Pairs and more of orders, rank by rank, that are not all the same."""
    ways = list(itertools.permutations(range(count)))
    return [[ways[(rank * step + k) % len(ways)] for rank in range(world)]
            for step in (1, 2) for k in range(len(ways))]


def all_orders(arrow_sets):
    mesh = Mesh(cp=dist.get_world_size())
    tried = 0
    for arrows in arrow_sets:
        expected = one_by_one(arrows, mesh)
        for by_rank in orders(mesh.size, len(arrows)):
            for recompute in (False, True):
                found = waited_in(by_rank[mesh.rank], arrows, mesh, recompute)
                torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
                tried += 1
    return tried


def test_flights_waited_for_in_other_orders_are_never_swapped(ranks):
    sets = [(A, A), (B, B), (C, C), (A, B, C), (A, A, A)]
    assert ranks(2).run(all_orders, sets) == [(3 * 2 * 2 + 2 * 2 * 6) * 2] * 2


def test_nor_are_they_on_four_ranks(ranks):
    ranks(4).run(all_orders, [(A, A, A), (C, A)])


def over_two_groups():
    mesh = Mesh(dp=2, cp=2)
    arrows = [a.replace("cp", axis) for axis in ("dp", "cp") for a in (A, B)]
    expected = one_by_one(arrows, mesh)
    for k in range(8):
        order = list(itertools.permutations(range(4)))[(k * 5 + mesh.rank * 7) % 24]
        found = waited_in(order, arrows, mesh)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_nor_over_several_groups(ranks):
    ranks(4).run(over_two_groups)


def beside_others():
    """A wait before or behind a move that is not in flight, and behind another's start."""
    mesh = Mesh(cp=2)
    expected = one_by_one((A, A, A), mesh)
    for early in (0, 1):
        terms = [term(mesh, i) for i in range(3)]
        first, arrived = start(terms[0], A, mesh), {}
        if mesh.rank == early:
            arrived[0] = first.wait()
        arrived[1] = reshard(terms[1], A, mesh)
        last = start(terms[2], A, mesh)
        if mesh.rank == early:
            arrived[2] = last.wait()
        else:
            arrived[2], arrived[0] = last.wait(), first.wait()
        loss_of(arrived, mesh).backward()
        found = [arrived[i].detach() for i in range(3)], [x.grad for x in terms]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_nor_beside_moves_that_are_not_in_flight(ranks):
    ranks(2).run(beside_others)


def dropped_between(which):
    """One of three flights is dropped, on all ranks or on one, before or behind a wait."""
    mesh = Mesh(cp=2)
    (first, _, last), (g0, _, g2) = one_by_one((A, A, A), mesh)
    for drop_late in (False, True):
        terms = [term(mesh, i) for i in range(3)]
        flights = [start(x, A, mesh) for x in terms]
        arrived = {}
        if not drop_late and mesh.rank in which:
            flights[1] = None
        for i in (0, 2) if mesh.rank else (2, 0):
            arrived[i] = flights[i].wait()
            flights[i] = None
        if mesh.rank in which:
            flights[1] = None
        loss_of(arrived, mesh).backward()
        torch.testing.assert_close([arrived[0], arrived[2]], [first, last], rtol=0, atol=0)
        torch.testing.assert_close([terms[0].grad, terms[2].grad], [g0, g2], rtol=0, atol=0)
        if flights[1] is not None:
            flights[1].wait()  # its values come here too, though a peer has dropped its own
    assert torch.equal(reshard(terms[0].detach(), A, mesh), first)


@pytest.mark.parametrize("which", [(0, 1), (0,), (1,)], ids=str)
def test_a_dropped_flight_takes_nobody_elses_place(ranks, which):
    ranks(2).run(dropped_between, which)


def results_unused_on_one():
    """Rank 0 has no use for the first result: its peer's gradient is not taken for another's."""
    mesh = Mesh(cp=2)
    _, (_, right) = one_by_one((A, A), mesh)
    terms = [term(mesh, i) for i in range(2)]
    arrived = {i: start(x, A, mesh).wait() for i, x in enumerate(terms)}
    used = {1: arrived[1]} if mesh.rank == 0 else arrived
    inputs = [terms[1]]  # rank 1 asks for the first one's gradient too, but does not wait for it
    (grad,) = torch.autograd.grad(loss_of(used, mesh), inputs)
    torch.testing.assert_close(grad, right, rtol=0, atol=0)


def test_a_gradient_that_only_one_rank_sends_is_not_taken_for_another(ranks):
    ranks(2).run(results_unused_on_one)


def on_a_device():
    """The way of devices, on the CPU: what comes for another move is an error, never a value."""
    group, me = dist.group.WORLD, dist.get_rank()
    x = {0: torch.arange(3.0) + 10 * me, 1: torch.arange(3.0) + 10 * me + 5}
    landing = [Landing({0: (3,), 1: (3,)}, x[0], lane=lane) for lane in (2, 4)]
    here = [transport.launch_single(x, land, group) for land in landing]
    values = [flight.wait()[1 - me].tolist() for flight in here]
    first, second = landing if me == 0 else landing[::-1]
    swapped = [transport.launch_single(x, land, group) for land in (first, second)]
    faults = []
    for flight in swapped:
        with pytest.raises(RuntimeError) as error:
            flight.wait()
        faults.append(str(error.value))
    return values, faults


def test_on_devices_another_order_is_refused(ranks):
    text = "ranks came to their moves in different orders; wait in one order on all ranks"
    (zero, faults), (one, others) = ranks(2).run(on_a_device)
    assert zero == [[10.0, 11.0, 12.0]] * 2
    assert one == [[5.0, 6.0, 7.0]] * 2
    assert faults == others == [text] * 2
