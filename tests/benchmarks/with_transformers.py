"""One optimizer step of transformers' model: under DDP, under FSDP2, or cut by hand."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tests.benchmarks.by_hand import split_by_hand, sum_terms
from tests.benchmarks.weights import set_weights, whole
from tests.benchmarks.workloads import BATCH, CLIP, OPTIMIZER, Drawn, Workload, draw_sample

# By hand, samples go through the model one after another, as in the others, or in one batch.
MODES = {"hf ddp": "ddp", "hf fsdp": "fsdp", "torch tp sp": "tp", "torch tp sp batch": "tp batch"}


class Transformers:
    """transformers' model on a rank's samples, or by hand on those of all."""

    def __init__(self, workload: Workload, mode: str) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.Qwen3VLMoeConfig(**workload.raw)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = transformers.Qwen3VLMoeForConditionalGeneration(config).train()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._by_hand, self._batch = mode.startswith("tp"), mode == "tp batch"
        if self._by_hand:
            split_by_hand(model, mesh)
        if mode == "fsdp":
            for unit in (*model.model.language_model.layers, *model.model.visual.blocks, model):
                fully_shard(unit, mesh=mesh)
        model.to_empty(device="cpu")
        set_weights(model)
        _set_frequencies(model)
        self._workload, self.model = workload, model
        self._net = DistributedDataParallel(model) if mode == "ddp" else model
        self._groups = _by_mesh(list(model.parameters()))
        groups = [{"params": group} for group in self._groups]
        self._optimizer = torch.optim.AdamW(groups, **OPTIMIZER)

    def prepare(self, step: int) -> list[dict[str, Tensor]]:
        """What this rank computes in a step, forward by forward."""
        rank, world = dist.get_rank(), dist.get_world_size()
        if self._by_hand:
            rank, world = 0, 1
        mine = range(rank * BATCH // world, (rank + 1) * BATCH // world)
        each = [self._inputs(draw_sample(self._workload, step * BATCH + i)) for i in mine]
        if self._batch:
            return [{name: torch.cat([one[name] for one in each]) for name in each[0]}]
        return each

    def _inputs(self, drawn: Drawn) -> dict[str, Tensor]:
        ids = torch.tensor([drawn.ids])
        return {
            "input_ids": ids,
            "mm_token_type_ids": (ids == self._workload.ids["image"]).int(),
            "labels": torch.tensor([drawn.labels]),
            "pixel_values": drawn.pixels,
            "image_grid_thw": torch.tensor(drawn.grids),
        }

    def compute(self, prepared: list[dict[str, Tensor]]) -> Tensor:
        """Zero, forward, backward; returns this rank's share of the loss."""
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for inputs in prepared:
            with loss_parallel() if self._by_hand else nullcontext():
                loss = self._net(**inputs, use_cache=False).loss / len(prepared)
                loss.backward()
            total += whole(loss.detach())
        if self._by_hand:
            sum_terms(list(self.model.parameters()))
        return total / dist.get_world_size()

    def update(self) -> None:
        """Clip and update."""
        norms = [whole(get_total_norm([p.grad for p in group])) for group in self._groups]
        norm = torch.stack(norms).norm()
        for group in self._groups:
            clip_grads_with_norm_(group, CLIP, norm)
        self._optimizer.step()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's gradient, whole."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, whole(parameter.grad)


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by the mesh that they live on: torch's norm and optimizer take no mixtures."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def _set_frequencies(model: nn.Module) -> None:
    """Compute what rotary embeddings keep beside their parameters."""
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            plain = next(c for c in type(module).__mro__ if c.__name__.endswith("RotaryEmbedding"))
            module.inv_freq.copy_(plain(module.config).inv_freq)
            module.original_inv_freq.copy_(module.inv_freq)
