import importlib
import itertools
import sys

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError, install_import_hook, jaxtyped
from torch import Tensor

from vlshard import MeshShape, Packing, PlanError, Sharded, SpecError, use_mesh
from vlshard.typed.sharded import DTYPES

CP4 = MeshShape(cp=4)


def fits(mesh, rank, *pairs, **packings):
    """Which tensors fit their annotations, all in one call on one rank."""
    with use_mesh(mesh, rank, **packings), jaxtyped("context"):
        return [isinstance(torch.zeros(shape), kind) for kind, shape in pairs]


def S(text):
    return Sharded[Tensor, text]


def F(text):
    return Float[Tensor, text]


def chunks(size, ranks):
    """Rows of each rank as torch.chunk deals them."""
    cut = [len(part) for part in torch.arange(size).chunk(ranks)] if size else []
    return cut + [0] * (ranks - len(cut))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_split_dim_has_what_the_layout_gives_the_rank(ranks):
    mesh = MeshShape(cp=ranks)
    for size, rank in itertools.product((0, 1, 5, 8, 9), range(ranks)):
        rows = chunks(size, ranks)[rank]
        for got in range(rows + 2):
            pairs = [(F("s"), size), (S("b s@cp"), (2, got))]
            assert fits(mesh, rank, *pairs) == [True, got == rows], (size, rank, got)


@pytest.mark.parametrize("text", ["s@cp", "s@dp@cp", "s@(dp cp)", "s@dp.zigzag@cp", "s@cp@dp"])
def test_a_size_in_parts_and_whole_is_one_size_whichever_comes_first(text):
    mesh = MeshShape(dp=2, cp=3)

    def local(size, rank):
        dp, cp = divmod(rank, 3)
        match text:
            case "s@cp":
                return chunks(size, 3)[cp]
            case "s@dp@cp":
                return chunks(chunks(size, 2)[dp], 3)[cp]
            case "s@(dp cp)":
                return chunks(size, 6)[rank]
            case "s@dp.zigzag@cp":
                quarters = [size // 4 + (i < size % 4) for i in range(4)]
                return chunks(quarters[dp] + quarters[3 - dp], 3)[cp]
            case _:
                return chunks(chunks(size, 3)[cp], 2)[dp]

    for rank, size, other in itertools.product(range(6), (0, 7, 13), (7, 12, 14)):
        rows = local(size, rank)
        good = local(other, rank) == rows
        assert fits(mesh, rank, (S(text), rows), (F("s"), other)) == [True, good]
        assert fits(mesh, rank, (S(text), rows), (S(" s"), other)) == [True, good]
        assert fits(mesh, rank, (F("s"), other), (S(text), rows)) == [True, good]


@pytest.mark.parametrize("rank", range(4))
def test_two_splits_of_a_size_fit_if_some_global_size_gives_both(rank):
    """Brute force over all global sizes, on a mesh where uneven sizes differ between splits."""
    mesh, dp = MeshShape(dp=2, cp=2), rank // 2
    told = {(chunks(size, 2)[dp], chunks(size, 4)[rank]) for size in range(60)}
    for rows in itertools.product(range(6), range(4)):
        pairs = zip((S("s@dp"), S("s@(dp cp)")), rows, strict=True)
        assert all(fits(mesh, rank, *pairs)) == (rows in told), rows


def test_a_size_that_parts_left_open_is_settled_by_the_first_whole_dim():
    open_size = (S("s@cp"), 4)
    assert fits(CP4, 0, open_size, (F("s"), 14), (F("s"), 15)) == [True, True, False]
    assert fits(CP4, 0, open_size, (F("s"), 17), (F("s"), 15)) == [True, False, True]
    assert fits(CP4, 3, open_size, (F("s s"), (16, 15)), (F("s"), 16)) == [True, False, True]
    assert fits(CP4, 0, open_size, (F("s t"), (14, 2)), (F("t s"), (3, 15))) == [True, True, False]


def test_a_tensor_that_does_not_fit_binds_nothing():
    assert fits(CP4, 0, (S("b s@cp 3"), (2, 4, 5)), (F("b s"), (7, 9))) == [False, True]


def test_fused_dims_are_products_and_tell_the_one_that_is_missing():
    tp = MeshShape(tp=2)
    heads = (F("h"), 6), (F("d"), 5)
    assert fits(tp, 1, *heads, (S("(h@tp d) m"), (15, 4))) == [True] * 3
    assert fits(tp, 1, *heads, (S("(h@tp d) m"), (10, 4)))[2] is False
    assert fits(tp, 1, *heads, (S("(3 h@tp d) m"), (45, 4)))[2] is True
    assert fits(tp, 1, *heads, (S("(h d)@tp m"), (15, 4)))[2] is True
    assert fits(tp, 1, (F("d"), 5), (S("(h@tp d)"), 15), (F("h"), 6), (F("h"), 3)) == [
        *[True] * 3,
        False,
    ]
    assert fits(tp, 1, (F("d"), 4), (S("(h@tp d)"), 15)) == [True, False]
    assert fits(tp, 0, (F("h"), 3), (F("d"), 4), (S("(h@tp d)"), 6))[2] is False
    assert fits(tp, 0, (S("h@tp"), 3), (F("d"), 5), (S("(h d)"), 25))[2] is True
    assert fits(tp, 0, (S("h@tp"), 3), (F("d"), 5), (S("(h d)"), 35))[2] is False


def test_a_fused_dim_has_one_size_before_its_parts_are_known():
    tp = MeshShape(tp=2)
    assert fits(tp, 0, (S("(h@tp d)"), 12), (S("(h d)"), 24), (S("(h d)@tp"), 12)) == [True] * 3
    assert fits(tp, 0, (S("(h@tp d)"), 12), (S("(h d)"), 23)) == [True, False]
    assert fits(tp, 0, (S("(h d)@tp"), 12), (S("(h d)"), 23), (F("h"), 7)) == [True] * 3


def test_packed_dims_and_rows_at_home_go_by_the_packing_in_use():
    mesh = MeshShape(dp=2, cp=2)
    packing = Packing([8, 4, 12], unit=4, home=[0, 0, 1])
    rows = {"(img s)@(dp cp) c": 8, "(img@dp.home s)@cp c": 8, "(img@dp.home s) c": 12}
    for text, count in rows.items():
        assert fits(mesh, 0, (S(text), (count, 3)), img=packing) == [True]
        assert fits(mesh, 0, (S(text), (count + 4, 3)), img=packing) == [False]
    assert fits(mesh, 3, (S("(img s@cp) c"), (12, 3)), img=packing) == [True]
    assert fits(mesh, 3, (S("(img s) c"), (24, 3)), img=packing) == [True]
    batch = Packing([1] * 3, home=[0, 1, 1])
    assert [fits(mesh, 2, (S("b@dp.home m"), (n, 1)), b=batch) for n in (1, 2, 3)] == [
        [False],
        [True],
        [False],
    ]


def test_without_a_mesh_every_dim_is_whole():
    with jaxtyped("context"):
        assert isinstance(torch.zeros(2, 5), S("b@dp s@cp.zigzag"))
        assert not isinstance(torch.zeros(4), S("s@cp"))
        assert isinstance(torch.zeros(10, 3), S("(b@dp s)@cp m + tp"))
        assert not isinstance(torch.zeros(3), F("m s"))
        assert isinstance(torch.zeros(3), F("m"))


def test_dots_stand_for_any_dims_and_bind_nothing():
    pairs = [(S("b ... s@cp"), (2, 7, 9, 4)), (S("b ... s@cp"), (2, 4)), (S("... b"), (8, 2))]
    assert fits(CP4, 0, *pairs) == [True, True, True]
    assert fits(CP4, 0, (S("b ... s@cp"), 4)) == [False]


def test_dtype_words_are_torch_dtypes_and_families():
    allowed = {
        "float32": [torch.float32],
        "float": [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn],
        "int": [torch.int64, torch.int8],
        "uint": [torch.uint8],
        "bool": [torch.bool],
        "complex": [torch.complex64],
    }
    every = {dtype for dtypes in allowed.values() for dtype in dtypes}
    for word, dtypes in allowed.items():
        found = {d for d in every if isinstance(torch.empty(2, dtype=d), S(f"{word} b"))}
        assert found == set(dtypes), word
    assert DTYPES["int"] >= {torch.int16, torch.int32}


def test_unions_and_other_types_are_asked_as_usual():
    with use_mesh(CP4, 0), jaxtyped("context"):
        assert isinstance(None, S("s@cp") | None)
        assert isinstance(torch.zeros(2, 3), S("s@cp") | S("s@cp m"))
        assert not isinstance([1.0, 2.0], S(" b"))


@pytest.mark.parametrize("item", ["b s", (Tensor,), (int, "b"), (Tensor, 3), ("Tensor", "b")])
def test_other_things_in_the_brackets_are_refused(item):
    with pytest.raises(TypeError, match=r"write Sharded\[Tensor, 'b s@cp m'\]"):
        Sharded[item]


def test_a_spec_that_cannot_be_read_is_refused_where_it_stands():
    with pytest.raises(SpecError) as error:
        Sharded[Tensor, "float32 b s@)"]
    assert str(error.value) == (
        "a mesh axis was expected after '@', got ')'\n  float32 b s@)\n              ^"
    )


def test_use_mesh_needs_a_rank_of_the_mesh():
    with pytest.raises(PlanError, match="a MeshShape has no ranks running: say whose part"):
        use_mesh(CP4).__enter__()
    with pytest.raises(PlanError, match="rank 4 is not on the mesh of 4 ranks"):
        use_mesh(CP4, 4).__enter__()


@jaxtyped(typechecker=beartype)
def attend(
    q: Sharded[Tensor, "float32 b s@cp h d"],
    k: Sharded[Tensor, "float32 b s@cp.zigzag h d"],
    mask: Float[Tensor, "b s"],
) -> Sharded[Tensor, "b s h@cp d"]:
    return torch.zeros(2, mask.shape[1], 1, 5)


def reason(q, k, mask):
    """Our part of what is raised."""
    with pytest.raises(TypeCheckError) as error:
        attend(torch.zeros(q), torch.zeros(k), torch.zeros(mask))
    cause = error.value.__cause__
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return str(cause).split(", as ")[-1]


MODULE = f"{attend.__module__}.attend"


def test_calls_that_fit_pass():
    with use_mesh(CP4, 0):
        attend(torch.zeros(2, 4, 4, 5), torch.zeros(2, 3, 4, 5), torch.zeros(2, 15))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            [(2, 4, 4, 5), (2, 2, 4, 6), (2, 16)],
            "'k' of {f} is not as declared\n"
            "  float32 b s@cp.zigzag h d\n"
            "            ^^^^^^^^^^^   ^\n"
            "  's@cp.zigzag' is 2, which fits no size of 's' where 's@cp' is 4 in 'q'\n"
            "  'd' is 6, expected 5\n"
            "  sizes: b=2 ('q'), s=16 if even ('s@cp' is 4 in 'q'), h=4 ('q'), d=5 ('q')\n"
            "  mesh: cp=4; this is rank 0.",
        ),
        (
            [(2, 4, 5), (2, 4, 4, 5), (2, 16)],
            "'q' of {f} is not as declared\n"
            "  float32 b s@cp h d\n"
            "  ^^^^^^^^^^^^^^^^^^\n"
            "  the spec has 4 dims, the tensor 3\n"
            "  mesh: cp=4; this is rank 0.",
        ),
        (
            [(2, 4, 8, 5), (2, 4, 8, 5), (2, 16)],
            "the result of {f} is not as declared\n"
            "  b s h@cp d\n"
            "      ^^^^\n"
            "  'h@cp' is 1, expected 2 of h=8\n"
            "  sizes: b=2 ('q'), s=16 (a whole dim), h=8 ('q'), d=5 ('q')\n"
            "  mesh: cp=4; this is rank 0.",
        ),
    ],
)
def test_messages_name_call_place_rank_and_sizes(shapes, message):
    with use_mesh(CP4, 0):
        assert reason(*shapes) == message.format(f=MODULE)


def test_messages_say_so_if_no_mesh_is_in_use():
    assert reason((2, 16, 4, 5), (2, 4, 4, 5), (2, 16)) == (
        f"'k' of {MODULE} is not as declared\n"
        "  float32 b s@cp.zigzag h d\n"
        "            ^^^^^^^^^^^\n"
        "  's' is 4, expected 16\n"
        "  sizes: b=2 ('q'), s=16 ('q'), h=4 ('q'), d=5 ('q')\n"
        "  no mesh is in use, so each dim is whole; with use_mesh(mesh) splits count."
    )


@jaxtyped(typechecker=beartype)
def project(
    x: Float[Tensor, "b m"], w: Sharded[Tensor, "int (3 h@tp d) m@xp"], bias: Tensor | None = None
) -> Tensor:
    return x


def test_messages_point_at_dtypes_and_unknown_axes():
    with use_mesh(MeshShape(tp=2), 1), pytest.raises(TypeCheckError) as error:
        project(torch.zeros(2, 8), torch.zeros(6, 8))
    assert str(error.value.__cause__.__cause__).split(", as ")[-1] == (
        f"'w' of {project.__module__}.project is not as declared\n"
        "  int (3 h@tp d) m@xp\n"
        "  ^^^              ^^\n"
        "  the dtype is torch.float32, not int\n"
        "  unknown mesh axis 'xp'\n"
        "  sizes: b=2 (another annotation), m=8 (another annotation)\n"
        "  mesh: tp=2; this is rank 1."
    )


SOURCE = """
from torch import Tensor
from vlshard import Sharded

def double(x: Sharded[Tensor, "s@cp m"]) -> Sharded[Tensor, "s m"]:
    return x
"""


def test_only_the_hook_checks(tmp_path, monkeypatch):
    for name in ("annotated_checked", "annotated_free"):
        (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with install_import_hook("annotated_checked", "beartype.beartype"):
        checked = importlib.import_module("annotated_checked")
    free = importlib.import_module("annotated_free")
    assert not hasattr(free.double, "__wrapped__")
    with use_mesh(MeshShape(cp=2), 0):
        assert free.double(torch.zeros(2, 3)).shape == (2, 3)
        assert checked.double(torch.zeros(0, 3)).shape == (0, 3)
        with pytest.raises(TypeCheckError, match=r"return value of annotated_checked\.double"):
            checked.double(torch.zeros(2, 3))
