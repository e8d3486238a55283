"""Split blocks beside transformers: its own model in one process, and its own tensor parallelism."""

import copy
import warnings

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.distributed import DistributedConfig

from model.config.config import Config
from tests.batches import Batch
from tests.dist.test_splits import TP, VISION, raw, write_plan_of
from tests.hf_oracle import hf_model, hf_outcome
from tests.tiny import image, make_batch, sample
from tests.training import Outcome, Run, full, own_part

WIDE, SQUARE = (1, 4, 6), (1, 4, 4)
ROWS = (
    sample([1, 2, 3, *image(WIDE), 4, 5, *image(SQUARE), 7], WIDE, SQUARE),
    sample([3, 1, 4, 1, 5, 9, 2, 6, 5, 35]),
)
CUT = ("dp=1, tp=2", TP | VISION, "(img@dp.home s)@tp c", "b@dp.home s@tp m", "{}")
NORMS = [f"self_attn.{name}_norm.weight" for name in "qk"]


def dense() -> dict:
    """Without experts, for which transformers' plan has rules of its own."""
    found = raw()
    found["text_config"]["mlp_only_layers"] = [0, 1, 2, 3]
    return found


def cut_by_transformers(raw, whole) -> Qwen3VLMoeForConditionalGeneration:
    """transformers' model under its own plan, as from_pretrained makes it, with these weights."""
    kind = Qwen3VLMoeForConditionalGeneration
    with torch.device("meta"):
        model = kind(Qwen3VLMoeConfig(**copy.deepcopy(raw))).train()
    chosen = DistributedConfig(tp_size=2, tp_plan="auto")
    config, _, mesh = kind.prepare_distribute_model(chosen)
    model = kind.maybe_distribute_model(model, config, mesh)
    model.to_empty(device="cpu")
    values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    with torch.no_grad():
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            right = values[name]
            if isinstance(x, DTensor):
                placed = x.device_mesh, x.placements
                right = distribute_tensor(right.detach(), *placed, src_data_rank=None)
            x.copy_(right)
    return model


def beside(path, raw):
    """Our faults and loss, transformers' in one process, and its norms' gradients under its plan."""
    config = Config.from_dict(raw)
    batch, oracle = make_batch(config, *ROWS), hf_model(raw)
    right = hf_outcome(oracle, batch)
    run = Run(config, path)
    weights = dict(oracle.named_parameters())
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            part = own_part(name, weights[name].detach(), run.parts)
            if isinstance(parameter, DTensor):
                placed = parameter.device_mesh, parameter.placements
                part = distribute_tensor(part, *placed, src_data_rank=None)
            parameter.copy_(part)
    expected = Outcome(losses=[float(right.loss)], gradients=right.gradients)
    found = run.probe(Batch(batch.samples, batch.pixels), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = hf_outcome(cut_by_transformers(raw, oracle), batch)
    off = {
        name: float((full(gradient) - right.gradients[name]).norm() / right.gradients[name].norm())
        for name, gradient in theirs.gradients.items()
        if gradient is not None and "language_model.layers" in name
    }
    return found.faults, found.loss, float(right.loss), float(full(theirs.loss)), off


def test_loss_and_gradients_are_those_of_transformers_where_its_own_plan_is_wrong(ranks, tmp_path):
    path = write_plan_of(tmp_path / "split.py", *CUT)
    for faults, loss, right, theirs, off in ranks(2).run(beside, path, dense(), timeout=120):
        assert faults == []
        assert loss == pytest.approx(right, rel=1e-6)
        assert theirs == pytest.approx(right, rel=1e-5)
        wrong = {name for name, distance in off.items() if distance > 0.01}
        assert wrong == {name for name in off if any(name.endswith(norm) for norm in NORMS)}
