"""What torch's transforms make of a move: what the page of the language says of them."""

import pytest
import torch

from vlshard import Mesh, reshard, start

ARROW = "s@cp m -> s m"


def transformed() -> list[str]:
    """Which transforms refuse a move, by name."""
    mesh, x = Mesh(cp=2), torch.arange(6.0).reshape(2, 3)

    def moved(x):
        return reshard(x, ARROW, mesh).square().sum()

    calls = {
        "grad": lambda: torch.func.grad(moved)(x),
        "vjp": lambda: torch.func.vjp(moved, x),
        "vmap": lambda: torch.func.vmap(moved)(torch.stack([x, x])),
        "fullgraph": lambda: torch.compile(moved, backend="eager", fullgraph=True)(x),
    }
    refused = []
    for name, call in calls.items():
        try:
            call()
        except RuntimeError:
            refused.append(name)
    return refused


def test_function_transforms_and_whole_graphs_are_refused(ranks):
    found = ranks(2).run(transformed, timeout=60)
    assert found == [["grad", "vjp", "vmap", "fullgraph"]] * 2


def second_derivative(move) -> torch.Tensor:
    """The derivative of the norm of a gradient that went through a move."""
    mesh = Mesh(cp=2)
    x = torch.arange(1.0, 7.0).reshape(2, 3).requires_grad_()
    there = reshard(x, ARROW, mesh) if move == "reshard" else start(x, ARROW, mesh).wait()
    (first,) = torch.autograd.grad(there.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return second


def test_second_derivatives_go_through_reshard(ranks):
    # Both ranks compute the sum of all cubes: each gradient is 2 x 3 x^2. Its own sum is taken on both
    # ranks too, over what each holds: so the second is 2 x 2 x 3 x again, and nothing is refused.
    for second in ranks(2).run(second_derivative, "reshard"):
        assert torch.equal(second, 12 * torch.arange(1.0, 7.0).reshape(2, 3))


def refuses() -> str:
    with pytest.raises(RuntimeError) as error:
        second_derivative("start")
    return str(error.value)


def test_second_derivatives_through_a_flight_are_refused(ranks):
    first, second = ranks(2).run(refuses)
    assert first == second
