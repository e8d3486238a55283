import gc

import numpy as np
import pytest
import torch

from vlshard.comm.mesh import Mesh
from vlshard.comm.reshard import Lowered, bound_program, lower, reshard
from vlshard.language.errors import LayoutError, PlanError, SpecError
from vlshard.language.mesh_shape import MeshShape
from vlshard.language.packing import Packing
from vlshard.programs.transition import transition

MESH = Mesh(dp=1, cp=2)  # this process is rank 0 of it; nothing below communicates


def test_reshard_slices_without_ranks():
    x = torch.arange(15.0).reshape(5, 3).requires_grad_()
    y = reshard(x, "t d -> t@cp d", MESH, t=5)
    y.sum().backward()
    assert torch.equal(y, x[:3])
    assert x.grad.tolist() == [[1.0] * 3] * 3 + [[0.0] * 3] * 2


def test_reshard_hands_the_tensor_through_where_nothing_changes():
    x = torch.arange(6.0)
    assert reshard(x, "t@dp -> t", MESH) is x
    assert reshard(x, "t@cp -> t@cp", MESH) is x


def test_reshard_takes_dots_for_any_dims():
    x = torch.arange(24.0).reshape(4, 3, 2)
    assert torch.equal(reshard(x, "t ... -> t@cp ...", MESH), x[:2])
    assert torch.equal(reshard(x, "... d -> ... d@cp", MESH), x[..., :1])


def test_reshard_takes_a_packing():
    x = torch.arange(8.0)
    pack = Packing([4, 4], unit=2, home=[0, 0])
    assert reshard(x, "(img@dp.home s) -> (img@dp.home s@cp)", MESH, img=pack).tolist() == [
        0,
        1,
        4,
        5,
    ]


@pytest.mark.parametrize("name", ["x", "mesh", "arrow", "src", "dst"])
def test_dims_may_have_the_names_of_parameters(name):
    cut = reshard(torch.arange(5.0), f"{name} -> {name}@cp", MESH, **{name: 5})
    assert cut.tolist() == [0, 1, 2]


def test_programs_of_lengths_that_change_are_let_go():
    for rows in range(300):
        reshard(torch.empty(rows), "t -> t@cp", MESH, t=rows)
    assert sum(type(thing) is Lowered for thing in gc.get_objects()) <= 128


def test_lower_binds_once_for_many_tensors():
    cut = lower(transition("t d", "t@cp.zigzag d", MESH), MESH, {"t": 8, "d": 1})
    for offset in (0.0, 100.0):
        x = torch.arange(8.0)[:, None] + offset
        assert cut(x).flatten().tolist() == [offset, offset + 1, offset + 6, offset + 7]


def test_reshard_refuses_a_size_unlike_the_tensor():
    with pytest.raises(LayoutError) as error:
        reshard(torch.zeros(3, 2), "t d -> t@cp d", MESH, t=5)
    assert str(error.value) == (
        "the tensor of rank 0 has shape (3, 2), the layout gives it (5, 2)\n"
        "  t d -> t@cp d\n"
        "  ^\n"
        "  a plain dim that is not even over its axes needs its global size"
    )


@pytest.mark.parametrize(
    ("shape", "arrow", "sizes", "error", "match"),
    [
        ((4, 2), "t d -> t@cp d m", {}, SpecError, "same, in the same order"),
        ((4, 2), "t d m -> t@cp d m", {}, SpecError, "3 dims, the tensor 2"),
        ((4, 2), "t d -> t@cp d", {"tt": 4}, LayoutError, "size tt= is for no dim"),
        ((4, 2), "(h e) d -> (h@cp e) d", {}, LayoutError, "missing size of 'h', 'e'"),
        ((4, 2), "b@dp.home d -> b@dp.home d@cp", {}, LayoutError, "missing size of 'b'"),
        ((4, 2), "t@cp d -> t d", {}, PlanError, "no process group"),
        ((4, 2), "t@cp d -> t d@dq", {}, LayoutError, "unknown mesh axis 'dq'"),
    ],
)
def test_reshard_refuses(shape, arrow, sizes, error, match):
    with pytest.raises(error, match=match):
        reshard(torch.zeros(shape), arrow, MESH, **sizes)


def test_reshard_refuses_a_tensor_unlike_its_packing():
    with pytest.raises(LayoutError) as error:
        reshard(torch.zeros(6, 2), "(img s) d -> (img s)@cp d", MESH, img=Packing([4, 4]))
    assert str(error.value) == (
        "the tensor of rank 0 has shape (6, 2), the layout gives it (8, 2)\n"
        "  (img s) d -> (img s)@cp d\n"
        "  ^^^^^^^\n"
        "  the Packing of '(img s)' has 8 rows in all"
    )


def test_what_is_no_size_is_pointed_at():
    with pytest.raises(LayoutError) as error:
        bound_program(torch.zeros(4, 2), "(img s)@cp d -> (img s) d", MESH, {"img": [4, 4]})
    assert str(error.value) == (
        "size img=[4, 4] is no integer and no Packing\n  (img s)@cp d -> (img s) d\n   ^^^"
    )


def test_a_mesh_of_sizes_only_is_refused():
    with pytest.raises(PlanError) as error:
        bound_program(torch.zeros(4, 2), "t@cp d -> t d", MeshShape(cp=2), {})
    assert str(error.value) == (
        "a MeshShape has no ranks to send between\n"
        "  MeshShape(cp=2) is sizes only; make a Mesh on the running ranks"
    )


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError) as error:
        bound_program(np.zeros((4, 2)), "t@cp d -> t d", MESH, {})
    assert str(error.value) == "a torch.Tensor is resharded, not a numpy.ndarray"
