"""Entered tokens that are gathered again in backward: one process, a door that copies its rows."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from vlshard.plan.regather import Regathered


class Copying:
    """Two ranks with the same rows, seen from one: the way in doubles them, the way out halves."""

    def __init__(self, *, alias=False):
        self.entered, self.alias, self.ways = 0, alias, ()

    def enter(self, x):
        self.entered += 1
        return x.view_as(x) if self.alias else torch.cat([x, x])

    def leave(self, x):
        return x if self.alias else x[: len(x) // 2]


def given():
    draw = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(4, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    return rows.requires_grad_(), weight.requires_grad_()


def inside(door, rows, weight):
    entered = door.enter(rows)
    out = (entered @ weight).sin() * (entered @ weight.T)
    return door.leave(out), entered


def gradients(run, door, **backward):
    rows, weight = given()
    out = run(door, rows, weight)
    out.square().sum().backward(**backward)
    return out.detach(), rows.grad, weight.grad


def plainly(door, rows, weight):
    return inside(door, rows, weight)[0]


def recomputed(door, rows, weight):
    return checkpoint(plainly, door, rows, weight, use_reentrant=False)


@pytest.mark.parametrize(("run", "entered"), [(plainly, 2), (recomputed, 2)])
@pytest.mark.parametrize("alias", [False, True])
def test_gradients_are_the_same_and_a_recompute_gathers_once(run, entered, alias):
    expected = gradients(plainly, Copying(alias=alias))
    door = Copying(alias=alias)
    for found, right in zip(gradients(run, Regathered(door)), expected, strict=True):
        assert torch.equal(found, right)
    assert door.entered == entered


def test_what_was_entered_has_no_memory_once_it_is_left():
    rows, weight = given()
    out, entered = inside(Regathered(Copying()), rows, weight)
    assert entered.untyped_storage().nbytes() == 0
    out.sum().backward()
    assert entered.untyped_storage().nbytes() == 2 * rows.nbytes


def test_a_graph_that_is_kept_is_gone_through_twice():
    rows, weight = given()
    out, _ = inside(Regathered(Copying()), rows, weight)
    first = torch.autograd.grad(out.sum(), (rows, weight), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (rows, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_gradients_nothing_is_freed():
    rows, weight = given()
    with torch.no_grad():
        _, entered = inside(Regathered(Copying()), rows, weight)
    assert entered.untyped_storage().nbytes() == 2 * rows.nbytes


def test_a_second_derivative_is_refused():
    rows, weight = given()
    out, _ = inside(Regathered(Copying()), rows, weight)
    with pytest.raises(RuntimeError, match="differentiable once only"):
        torch.autograd.grad(out.sum(), rows, create_graph=True)
