import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from vlshard import LayoutError, MeshShape, Packing, SpecError, spec
from vlshard.comm.bridges import mesh_of
from vlshard.language.placements import gradient_placements, placements

MESH = MeshShape(dp=2, cp=(2, 4), tp=3)
WHOLE, SUM = Replicate(), Partial()


@pytest.mark.parametrize(
    ("text", "placed"),
    [
        ("b s m", (WHOLE, WHOLE, WHOLE, WHOLE)),
        ("", (WHOLE, WHOLE, WHOLE, WHOLE)),
        ("b@dp s@cp.0 h@tp d", (Shard(0), Shard(1), WHOLE, Shard(2))),
        ("b s@dp@cp.0@cp.1", (Shard(1), Shard(1), Shard(1), WHOLE)),
        ("b s@dp@tp m", (Shard(1), WHOLE, WHOLE, Shard(1))),
        ("b@cp.1 s m + dp", (SUM, WHOLE, Shard(0), WHOLE)),
        ("b s m + cp tp", (WHOLE, SUM, SUM, SUM)),
        ("4 (h@tp d)", (WHOLE, WHOLE, WHOLE, Shard(1))),
        ("(h@dp d)@tp m", (Shard(0), WHOLE, WHOLE, Shard(0))),
        ("((h@dp g)@cp.0 d)@tp m", (Shard(0), Shard(0), WHOLE, Shard(0))),
        ("b@dp ...", (Shard(0), WHOLE, WHOLE, WHOLE)),
    ],
)
def test_placements_name_each_part_of_the_mesh(text, placed):
    assert placements(text, MESH) == placed


@pytest.mark.parametrize(
    "text",
    ["s@(dp cp)", "s@(cp dp)", "s@cp@dp", "s@dp.zigzag@cp", "(3 s@dp)@cp", "(img@dp.balance s)@cp"],
)
def test_axes_of_size_one_may_stand_anywhere(text):
    assert placements(text, MeshShape(dp=1, cp=4)) == (Shard(0), Shard(0))


def test_parts_of_a_device_mesh_stand_side_by_side():
    ranks = torch.arange(24).reshape(2, 3, 4)
    meshes = [
        DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
        for names in (("cp.0", "cp.1", "dp"), ("cp.0", "dp", "cp.1"), ("cp", "dp", "cp.1"))
    ]
    assert mesh_of(meshes[0], spec("s@cp")) == MeshShape(cp=(2, 3), dp=4)
    for mesh in meshes[1:]:
        with pytest.raises(LayoutError) as error:
            mesh_of(mesh, spec("s@cp"))
        names = " ".join(mesh.mesh_dim_names)
        assert str(error.value) == (
            f"the mesh of the DTensor has parts of an axis apart: {names}\n"
            "  s@cp\n"
            "  ^^^^\n"
            "  fix: parts stand side by side"
        )


def test_packings_tell_packed_dims_from_fused_ones():
    parsed = spec("(img s)@tp c")
    assert placements(parsed, MESH) == (WHOLE, WHOLE, WHOLE, Shard(0))
    with pytest.raises(LayoutError) as error:
        placements(parsed, MESH, img=Packing([2, 4]))
    assert str(error.value) == (
        "DTensor has no packed dims such as '(img s)'\n"
        "  (img s)@tp c\n"
        "         ^^^\n"
        "  fix: reshard to a layout that has '(img s)' whole, or in contiguous blocks"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "b s@xp",
            "unknown mesh axis 'xp'\n"
            "  b s@xp\n"
            "      ^^\n"
            "  mesh: dp=2 cp=(2, 4) tp=3; did you mean 'cp', 'dp' or 'tp'?",
        ),
        (
            "b s@tp@dp",
            "DTensor cuts 's' in the order of the mesh, dp before tp\n"
            "  b s@tp@dp\n"
            "      ^^ ^^\n"
            "  mesh: dp=2 cp=(2, 4) tp=3",
        ),
        (
            "b s@(dp tp)",
            "DTensor cannot join axes into one cut, as '(dp tp)'\n"
            "  b s@(dp tp)\n"
            "     ^^^^^^^^\n"
            "  fix: '@dp@tp', cut after cut, is the same where 6 divides the size",
        ),
        (
            "b s@cp m",
            "DTensor cannot join axes into one cut, as 'cp'\n"
            "  b s@cp m\n"
            "     ^^^\n"
            "  fix: '@cp.0@cp.1', cut after cut, is the same where 8 divides the size",
        ),
        (
            "b s@dp@cp.0.zigzag",
            "DTensor has no '.zigzag', only contiguous blocks\n"
            "  b s@dp@cp.0.zigzag\n"
            "              ^^^^^^\n"
            "  fix: reshard to a layout that has 's' whole, or in contiguous blocks",
        ),
        (
            "(3 h@tp d) m",
            "DTensor can cut '(3 h d)' by its first dim only, or as a whole\n"
            "  (3 h@tp d) m\n"
            "      ^^^\n"
            "  fix: reshard to a layout that has '(3 h d)' whole, or in contiguous blocks",
        ),
        (
            "... m@tp",
            "the dims behind '...' cannot be counted\n"
            "  ... m@tp\n"
            "      ^^^^\n"
            "  fix: spec(...).expand(x.ndim) says how many it is",
        ),
    ],
)
def test_what_dtensor_cannot_say_is_pointed_at(text, message):
    with pytest.raises(LayoutError) as error:
        placements(text, MESH)
    assert str(error.value) == message


def test_a_text_that_is_no_spec_is_refused():
    with pytest.raises(SpecError, match="this bracket is never closed"):
        placements("(h d", MESH)


def test_gradients_are_sums_of_whole_values_and_whole_for_sums():
    assert gradient_placements((WHOLE, SUM, Shard(1))) == (SUM, WHOLE, Shard(1))
