import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.params import (
    AttentionParams,
    EmbedParams,
    LinearParams,
    MergerParams,
    MoeParams,
    NormParams,
)
from model.rope import rotate, slot_axes, text_rope, vision_rope
from model.text import add_visual, embed_tokens, labelled_rows, place_visual, rms_norm, sparse_mlp
from model.vision import embed_patches, merge_patches, merge_units, vision_attention
from vlshard.plan.boundaries import local_boundaries

ROOT = Path(__file__).parents[2]
CORES = ("params", "rope", "vision", "moe", "text", "loss")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"]
)
def test_patch_embedding_equals_the_convolution_it_stands_for(dtype, bound):
    conv = nn.Conv3d(3, 32, kernel_size=(2, 16, 16), stride=(2, 16, 16)).to(dtype)
    pixels = randn(24, 3 * 2 * 16 * 16).to(dtype).requires_grad_()
    weight = randn(24, 32, seed=1).to(dtype)
    inputs = (pixels, conv.weight, conv.bias)
    want = conv(pixels.view(-1, 3, 2, 16, 16)).view(24, 32)
    want_gradients = torch.autograd.grad((want * weight).sum(), inputs)
    params = EmbedParams(conv.weight, conv.bias, torch.zeros(4, 32, dtype=dtype))
    nowhere = torch.zeros(24, 4, dtype=torch.int64), torch.zeros(24, 4)
    got = embed_patches(params, pixels, *nowhere)
    gradients = torch.autograd.grad((got * weight).sum(), inputs)
    assert got.dtype == dtype
    for mine, wanted in zip((got, *gradients), (want, *want_gradients), strict=True):
        assert mine.shape == wanted.shape
        assert (mine - wanted).float().norm() <= bound * wanted.float().norm()


def test_patch_embedding_weighs_the_corners_of_the_table():
    params = EmbedParams(torch.zeros(8, 1, 1, 2, 2), torch.zeros(8), randn(9, 8))
    corners, weights = torch.tensor([[0, 1, 3, 4]]), torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    got = embed_patches(params, torch.zeros(1, 4), corners, weights)
    want = sum(w * params.table[i] for i, w in zip((0, 1, 3, 4), (0.1, 0.2, 0.3, 0.4), strict=True))
    torch.testing.assert_close(got[0], want)


@pytest.mark.parametrize(
    ("sections", "axes"),
    [((4, 2, 2), "THWTHWTT"), ((24, 20, 20), "THW" * 20 + "TTTT"), ((2, 1, 1), "THWT")],
)
def test_text_frequencies_take_their_axes_in_turn(sections, axes):
    got = slot_axes(sections, torch.device("cpu"))
    assert "".join("THW"[axis] for axis in got.tolist()) == axes


def test_text_phases_are_position_times_frequency_of_the_slots_axis():
    positions = torch.tensor([[[3, 5]], [[7, 11]], [[13, 17]]])
    rope = text_rope(positions, sections=(4, 2, 2), theta=100.0)
    speeds = 100.0 ** (-np.arange(8) / 8)
    fed = np.array([[3, 7, 13, 3, 7, 13, 3, 3], [5, 11, 17, 5, 11, 17, 5, 5]])
    torch.testing.assert_close(rope.cos[0].numpy(), np.cos(fed * speeds), check_dtype=False)
    torch.testing.assert_close(rope.sin[0].numpy(), np.sin(fed * speeds), check_dtype=False)


def test_vision_phases_are_rows_first_then_columns():
    rope = vision_rope(torch.tensor([[2, 5]]), width=8, theta=100.0)
    want = np.array([2.0, 2 * 100.0**-0.5, 5.0, 5 * 100.0**-0.5])
    torch.testing.assert_close(rope.cos[0].numpy(), np.cos(want), check_dtype=False)
    torch.testing.assert_close(rope.sin[0].numpy(), np.sin(want), check_dtype=False)


def test_rotate_turns_pairs_half_a_head_apart():
    x = randn(5, 3, 8)
    rope = vision_rope(torch.arange(10).reshape(5, 2), width=8, theta=100.0)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    turned = pairs * torch.complex(rope.cos, rope.sin)[:, None]
    got = rotate(x, rope)
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), dim=-1))
    assert rotate(x.bfloat16(), rope).dtype == torch.bfloat16


def test_rms_norm_is_scaled_in_the_dtype_of_its_input():
    x, weight = randn(4, 16), randn(16, seed=1)
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-3), want * weight)
    half = rms_norm(x.bfloat16(), weight.bfloat16(), eps=1e-3)
    assert half.dtype == torch.bfloat16


def test_visual_rows_replace_their_placeholders_and_nothing_else():
    embeds, rows = randn(2, 4, 6), randn(3, 6, seed=1)
    at = torch.tensor([1, 2, 7])
    got = place_visual(embeds, rows, at)
    want = embeds.clone()
    want[0, 1], want[0, 2], want[1, 3] = rows
    assert torch.equal(got, want)
    want = embeds.clone()
    want[0, 1] += rows[0]
    want[0, 2] += rows[1]
    want[1, 3] += rows[2]
    assert torch.equal(add_visual(embeds, rows, at), want)


def test_no_rows_at_all_stay_in_the_graph():
    embeds, rows = randn(0, 4, 6).requires_grad_(), randn(0, 6).requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    out = add_visual(place_visual(embeds, rows, none), rows, none)
    labelled_rows(out, none).sum().backward()
    assert out.shape == (0, 4, 6)
    assert (embeds.grad.shape, rows.grad.shape) == ((0, 4, 6), (0, 6))


def test_padding_reaches_no_expert():
    params = MoeParams(randn(8, 16), randn(8, 16, 24, seed=1), randn(8, 48, 16, seed=2))
    x = randn(2, 5, 16)
    real = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9])
    out, load = sparse_mlp(params, x, real, top_k=2, at=local_boundaries())
    poisoned = x.clone()
    poisoned[0, 3:] = float("nan")
    again, _ = sparse_mlp(params, poisoned, real, top_k=2, at=local_boundaries())
    assert torch.equal(out, again)
    assert not out[0, 3:].any()
    assert load.tokens == 8
    assert load.chosen.sum() == 16


def test_embedding_teaches_the_padding_token_nothing():
    table = randn(7, 4).requires_grad_()
    ids = torch.tensor([[1, 5, 5, 2]])
    embed_tokens(table, ids, padding_id=5, at=local_boundaries()).sum().backward()
    assert table.grad.any(1).tolist() == [False, True, True, False, False, False, False]


def test_mergers_keep_the_order_of_units():
    norm, unit_norm = NormParams(randn(8), randn(8)), NormParams(randn(32), randn(32))
    maps = LinearParams(randn(32, 32), randn(32)), LinearParams(randn(6, 32), randn(6))
    patches = randn(12, 8)
    for core, scale in ((merge_patches, norm), (merge_units, unit_norm)):
        params = MergerParams(scale, *maps)
        whole = core(params, patches, merge=2)
        parts = [core(params, patches[i : i + 4], merge=2) for i in (0, 4, 8)]
        torch.testing.assert_close(whole, torch.cat(parts))


def test_vision_attention_sees_all_of_its_frame_and_nothing_else():
    linears = [LinearParams(randn(16, 16, seed=i), randn(16, seed=9 + i)) for i in range(4)]
    params = AttentionParams(*linears)
    x = randn(10, 16)
    rope = vision_rope(torch.arange(20).reshape(10, 2), width=8, theta=100.0)
    changed = x.clone()
    changed[9] += 1
    before, after = (
        vision_attention(params, rows, rope, width=8, at=local_boundaries([4, 6]))
        for rows in (x, changed)
    )
    moved = (before - after).abs().amax(1) > 0
    assert moved.tolist() == [False] * 4 + [True] * 6


def imports_of(name: str) -> set[str]:
    """Modules that a file of model/ imports, by full name."""
    tree = ast.parse((ROOT / "model" / f"{name}.py").read_text())
    nodes = list(ast.walk(tree))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("name", CORES)
def test_cores_know_no_mesh_and_no_module(name: str):
    roots = {"einops", "jaxtyping", "torch", "typing", "collections"}
    allowed = {"vlshard.Boundaries", "vlshard.pytree.pytree"}
    others = {
        imported
        for imported in imports_of(name) - allowed
        if imported.split(".")[0] not in roots and imported.split(".")[:2][-1] not in CORES
    }
    banned = ("torch.distributed", "torch.nn.Module", "torch.nn.Parameter", "torch.cuda")
    assert not others
    assert not [imported for imported in imports_of(name) if imported.startswith(banned)]


@pytest.mark.parametrize("name", CORES)
def test_cores_read_nothing_back_and_change_nothing_by_hand(name: str):
    read_back = {"item", "tolist", "cpu", "numpy", "nonzero"}
    by_hand = {"view", "permute", "transpose", "reshape"}
    elsewhere = {"Module", "Parameter", "distributed", "environ", "cuda", "DTensor"}
    tree = ast.parse((ROOT / "model" / f"{name}.py").read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not used & (read_back | by_hand | elsewhere)


BLOCKER = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        if parts[:2] == ["transformers", "models"] and parts[-1].startswith("modeling_"):
            raise ImportError(f"{name} is blocked")
        return None

sys.meta_path.insert(0, Blocker())
try:
    import transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe
except ImportError:
    print("blocked")
import torch
from model.config import Config
from model.modules import Qwen3VLMoe
from tests.tiny import tiny_raw, make_batch, sample, image
torch.manual_seed(0)
config = Config.from_dict(tiny_raw())
model = Qwen3VLMoe(config)
for weight in model.parameters():
    torch.nn.init.normal_(weight, std=0.1)
batch = make_batch(config, sample([1, *image((1, 4, 6)), 2, 3], (1, 4, 6)))
loss = model(batch.inputs, batch.at)
loss.backward()
print(bool(loss.isfinite()), all(w.grad is not None for w in model.parameters()))
"""


def test_the_model_runs_where_transformers_modeling_cannot_be_imported():
    run = subprocess.run(
        [sys.executable, "-c", BLOCKER],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout.split("\n")[:2] == ["blocked", "True True"], run.stderr
