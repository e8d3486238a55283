"""Every public core states its shapes in full, and the shape hook holds it to them."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from torch import Tensor

from model.moe import Load
from model.params import (
    AttentionParams,
    EmbedParams,
    LinearParams,
    MergerParams,
    MlpParams,
    MoeParams,
    NormParams,
    TextBlockParams,
    VisionBlockParams,
)
from model.rope import Rope
from vlshard.plan.boundaries import local_boundaries

CORES = tuple(
    importlib.import_module(f"model.{name}")
    for name in ("rope", "vision", "moe", "text", "loss", "params")
)
REFUSED = (jaxtyping.TypeCheckError, BeartypeCallHintViolation)


def public(kind: Callable[[Any], bool]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Public functions or classes that the core modules define."""
    for module in CORES:
        for name, value in inspect.getmembers(module, kind):
            if value.__module__ == module.__name__ and not name.startswith("_"):
                yield module, name, value


def bare(annotation: Any) -> bool:
    """Whether an annotation says nothing, or names a tensor without its shape."""
    parts = getattr(annotation, "__args__", ())
    return annotation in (inspect.Parameter.empty, Tensor, Any) or any(map(bare, parts))


def test_bare_annotations_are_told_from_full_ones():
    assert all(map(bare, (inspect.Parameter.empty, Tensor, tuple[Tensor, int], Tensor | None)))
    assert not any(map(bare, (int, Load, Float[Tensor, "t m"], tuple[Float[Tensor, ""], Load])))


def test_no_public_core_lacks_annotations():
    found = []
    for module, name, function in public(inspect.isfunction):
        signature = inspect.signature(function)
        returned = {"return": signature.return_annotation}
        given = {key: value.annotation for key, value in signature.parameters.items()}
        found += [
            f"{module.__name__}.{name}: {key}"
            for key, kind in (given | returned).items()
            if bare(kind)
        ]
    assert not found


def test_no_tree_of_parameters_lacks_shapes():
    found = [
        f"{name}.{field}"
        for _, name, cls in public(inspect.isclass)
        for field, kind in cls.__annotations__.items()
        if bare(kind)
    ]
    assert not found


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def linear(out: int, inp: int) -> LinearParams:
    return LinearParams(floats(out, inp), floats(out))


def norm(width: int) -> NormParams:
    return NormParams(floats(width), floats(width))


def vision_attn() -> AttentionParams:
    return AttentionParams(*(linear(8, 8) for _ in range(4)))


def text_attn() -> AttentionParams:
    return AttentionParams(linear(16, 8), linear(8, 8), linear(8, 8), linear(8, 16))


EMBED = EmbedParams(floats(8, 1, 1, 2, 2), floats(8), floats(9, 8))
AT = local_boundaries([3, 5])
MOE = MoeParams(floats(4, 8), floats(4, 8, 12), floats(4, 24, 8))
VISION_ROPE, TEXT_ROPE = Rope(floats(8, 2), floats(8, 2)), Rope(floats(2, 4, 2), floats(2, 4, 2))
VISION_BLOCK = VisionBlockParams(norm(8), vision_attn(), norm(8), linear(12, 8), linear(8, 12))
TEXT_BLOCK = TextBlockParams(floats(8), text_attn(), floats(4), floats(4), floats(8), MOE)
LOAD = Load(floats(4), floats(4), floats())

# Per core: arguments that it takes, and the place and value of each argument that it must refuse.
Case = tuple[tuple[Any, ...], dict[str, Any], list[tuple[int, Any]]]
CALLS: dict[str, Case] = {
    "frequencies": ((8, 1e4, torch.device("cpu")), {}, [(0, 8.5), (2, "nowhere")]),
    "vision_rope": (
        (ints(6, 2),),
        {"width": 8, "theta": 1e4},
        [(0, ints(6, 3)), (0, floats(6, 2))],
    ),
    "slot_axes": (((4, 2, 2), torch.device("cpu")), {}, [(0, (4, 4))]),
    "text_rope": (
        (ints(3, 2, 4),),
        {"sections": (4, 2, 2), "theta": 1e4},
        [(0, ints(2, 3, 4)), (0, ints(3, 4)), (0, floats(3, 2, 4))],
    ),
    "rotate": ((floats(8, 2, 4), VISION_ROPE), {}, [(0, ints(8, 2, 4)), (1, floats(8, 2))]),
    "embed_patches": (
        (EMBED, floats(6, 4), ints(6, 4), floats(6, 4)),
        {},
        [(1, floats(6, 2, 2)), (2, ints(5, 4)), (2, ints(6, 3)), (3, floats(6, 2))],
    ),
    "heads": ((floats(6, 8), linear(16, 8), 4), {}, [(0, ints(6, 8)), (1, floats(16, 8))]),
    "layer_norm": ((floats(6, 8), norm(8)), {}, [(0, ints(6, 8)), (1, floats(8))]),
    "vision_attention": (
        (vision_attn(), floats(8, 8), VISION_ROPE),
        {"width": 4, "at": AT},
        [(1, floats(1, 8, 8)), (0, norm(8)), (2, floats(8, 2))],
    ),
    "vision_mlp": (
        (linear(12, 8), linear(8, 12), floats(6, 8)),
        {"at": AT},
        [(0, norm(8)), (2, floats(1, 6, 8)), (2, ints(6, 8))],
    ),
    "vision_block": (
        (VISION_BLOCK, floats(8, 8), VISION_ROPE),
        {"width": 4, "at": AT},
        [(1, floats(1, 8, 8)), (0, TEXT_BLOCK)],
    ),
    "merge_patches": (
        (MergerParams(norm(8), linear(32, 32), linear(6, 32)), floats(12, 8)),
        {"merge": 2},
        [(1, floats(3, 4, 8)), (1, ints(12, 8))],
    ),
    "merge_units": (
        (MergerParams(norm(32), linear(32, 32), linear(6, 32)), floats(12, 8)),
        {"merge": 2},
        [(1, floats(3, 4, 8)), (1, ints(12, 8))],
    ),
    "refuse_widths": (({"m": 8}, torch.float32), {}, [(0, 8), (1, "float32")]),
    "route": (
        (floats(4, 8), floats(7, 8), torch.arange(5)),
        {},
        [(0, floats(4, 9)), (1, ints(7, 8)), (2, floats(5))],
    ),
    "shares_of": ((floats(7, 4).exp(), ints(7, 2)), {}, [(0, floats(6, 4)), (1, floats(7, 2))]),
    "choose": (
        (floats(7, 4), torch.arange(7)),
        {"num_rows": 9, "num_here": 4, "top_k": 2, "at": AT},
        [(0, floats(7)), (0, ints(7, 4)), (1, ints(6))],
    ),
    "weighted_sums": (
        (floats(3, 8), floats(3), torch.arange(3), ints(2)),
        {},
        [(0, floats(8)), (1, floats(2)), (2, ints(2)), (3, floats(2))],
    ),
    "expert_ends": ((ints(6), 4), {}, [(0, ints(6, 2)), (0, floats(6))]),
    "run_experts": (
        (MOE.down, MOE.gate_up, floats(6, 8), torch.tensor([1, 2, 3, 6], dtype=torch.int32)),
        {},
        [(0, floats(4, 12, 8)), (1, floats(4, 23, 8)), (2, floats(6, 12)), (3, ints(5))],
    ),
    "moe": (
        (MOE, floats(6, 8), torch.arange(5)),
        {"top_k": 2, "at": AT},
        [(1, floats(2, 3, 8)), (0, floats(4, 8))],
    ),
    "total_load": (([LOAD, LOAD],), {"at": AT}, [(0, LOAD), (0, [floats(4)])]),
    "load_balance": (([LOAD, LOAD],), {}, [(0, LOAD), (0, [floats(4)])]),
    "embed_tokens": (
        (floats(9, 8), ints(2, 4)),
        {"padding_id": None, "at": AT},
        [(1, ints(4)), (1, floats(2, 4))],
    ),
    "rms_norm": ((floats(2, 4, 8), floats(8)), {"eps": 1e-6}, [(1, floats(7)), (1, floats(1))]),
    "place_visual": (
        (floats(2, 4, 8), floats(3, 8), ints(3)),
        {},
        [(0, floats(8, 8)), (1, floats(2, 8)), (1, floats(3, 7)), (2, ints(4)), (2, floats(3))],
    ),
    "add_visual": (
        (floats(2, 4, 8), floats(3, 8), ints(3)),
        {},
        [(0, floats(8, 8)), (1, floats(2, 8)), (1, floats(3, 1)), (2, ints(4)), (2, floats(3))],
    ),
    "text_attention": (
        (text_attn(), floats(4), floats(4), floats(2, 4, 8), TEXT_ROPE),
        {"eps": 1e-6, "at": AT},
        [(1, floats(3)), (2, floats(1)), (3, floats(8, 8)), (4, floats(2, 4, 2))],
    ),
    "mlp": (
        (MlpParams(floats(12, 8), floats(12, 8), floats(8, 12)), floats(2, 3, 8)),
        {"at": AT},
        [(0, MOE), (1, floats(6, 8)), (1, ints(2, 3, 8))],
    ),
    "sparse_mlp": (
        (MOE, floats(2, 4, 8), torch.arange(7)),
        {"top_k": 2, "at": AT},
        [(1, floats(8, 8)), (2, floats(7)), (2, ints(7, 1))],
    ),
    "text_block": (
        (TEXT_BLOCK, floats(2, 4, 8), TEXT_ROPE, torch.arange(7)),
        {"eps": 1e-6, "top_k": 2, "at": AT},
        [(0, VISION_BLOCK), (1, floats(8, 8)), (2, floats(2, 4, 2)), (3, ints(7, 1))],
    ),
    "labelled_rows": ((floats(2, 4, 8), ints(3)), {}, [(0, floats(8, 8)), (1, floats(3))]),
    "row_parts": ((floats(3, 9), ints(3)), {}, [(0, floats(2, 9)), (1, ints(2))]),
    "token_loss": (
        (floats(3, 8), floats(9, 8), ints(3), torch.tensor(3.0)),
        {"at": AT},
        [(0, floats(3, 7)), (1, floats(9, 7)), (2, ints(2)), (2, floats(3)), (3, floats(1))],
    ),
}
FUNCTIONS = {name: function for _, name, function in public(inspect.isfunction)}


def test_every_public_core_has_its_case():
    assert set(CALLS) == set(FUNCTIONS)


@pytest.mark.parametrize("name", CALLS)
def test_core_takes_its_shapes_and_refuses_others(name: str):
    args, static, wrong = CALLS[name]
    core = FUNCTIONS[name]
    core(*args, **static)
    for place, value in wrong:
        with pytest.raises(REFUSED):
            core(*(value if i == place else arg for i, arg in enumerate(args)), **static)


TREES: dict[type, tuple[tuple[int, ...], ...]] = {
    LinearParams: ((8, 4), (7,)),
    NormParams: ((8,), (7,)),
    EmbedParams: ((8, 3, 2, 4, 4), (8,), (9, 7)),
    MlpParams: ((12, 8), (12, 8), (12, 8)),
    MoeParams: ((4, 8), (4, 8, 12), (4, 12, 8)),
    Rope: ((6, 4), (6, 3)),
    Load: ((4,), (3,), ()),
}


@pytest.mark.parametrize("tree", TREES)
def test_tree_of_parameters_refuses_shapes_that_do_not_fit_together(tree: type):
    with pytest.raises(REFUSED):
        tree(*(floats(*shape) for shape in TREES[tree]))
