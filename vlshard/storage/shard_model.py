"""Stores a model's parameters as declared: FSDP2 on every unit, gradients as plain sums."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from vlshard.comm import Mesh
from vlshard.language import PlanError, nearest
from vlshard.pytree import tree_leaves
from vlshard.storage.declared import Storage
from vlshard.storage.fsdp_collectives import Buffers, GlooAllGather, GlooReduceScatter


def shard_model(
    model: nn.Module,
    storages: Mapping[str, Storage],
    mesh: Mesh,
    *,
    lookups: Collection[str] = (),
    compute_dtype: torch.dtype = torch.float32,
    device_type: str = "cpu",
) -> None:
    """Store the model's parameters unit by unit; the module itself becomes an FSDP2 root.

    Parameters stay in their own dtype at rest and are gathered in ``compute_dtype``; gradients
    are summed in fp32 over every rank that computed with them, and divided by nothing: the loss
    is a sum over ranks already divided by the global label count.

    Args:
      model: on the meta device, or with equal weights on all ranks.
      storages: storage of each unit, a module path whose parameters are gathered together, children
        before parents. The last one is the root, ``""``, with all parameters that no other unit
        holds; the one before it is the unit that forward uses last. ``BoundPlan.storages`` gives
        a plan's.
      mesh: the ranks that the storages name the axes of.
      lookups: units that only look rows up, so that their backward needs no parameters.
      compute_dtype: dtype of the gathered parameters.
      device_type: where the ranks compute.
    Raises: PlanError, before anything is sharded, if a unit is no module or in the wrong order, if
      an axis is unknown or named twice, or if there is no process group.
    """
    _check_units(model, list(storages), lookups)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    units = {unit: storage.on(mesh) for unit, storage in storages.items()}
    meshes = {
        storage: mesh.device_mesh(
            shard=storage.shard, replicate=storage.replicate, device_type=device_type
        )
        for storage in sorted(set(units.values()), key=str)
    }
    # What forward uses last, backward uses first: it is kept in between.
    kept = next((unit for unit in reversed(units) if unit), "")
    for unit in units:
        module, over = model.get_submodule(unit), meshes[units[unit]]
        free = False if unit == kept else None  # None: FSDP2 frees all but the root
        sharded = fully_shard(module, mesh=over, mp_policy=policy, reshard_after_forward=free)
        sharded.set_unshard_in_backward(unit not in lookups)
    stay = [model.get_submodule(unit) for unit in {kept, ""}]
    model.register_forward_hook(partial(_free, units=stay))
    buffers = Buffers()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if device_type == "cpu":
                module.set_custom_all_gather(cast(Any, GlooAllGather(buffers)))
                module.set_custom_reduce_scatter(cast(Any, GlooReduceScatter(buffers)))


def _check_units(model: nn.Module, units: Sequence[str], lookups: Collection[str]) -> None:
    """Units are modules of the model, each before those that it is a part of, the root last."""
    known = [name for name, _ in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())]
    for unit in (*units, *lookups):
        if unit not in known:
            raise PlanError(f"the model has no module {unit!r} to be a unit{nearest(unit, known)}")
    if not units or units[-1] != "":
        notes = ["the root stores the parameters that no other unit holds"]
        last = repr(units[-1]) if units else "nothing"
        raise PlanError(f'the last unit is {last}, not the root, ""', notes=notes)
    for i, unit in enumerate(units):
        if inner := [later for later in units[i:] if later.startswith(f"{unit}.")]:
            raise PlanError(f"unit {inner[0]!r} comes after {unit!r}, which it is a part of")
    if others := [unit for unit in lookups if unit not in units]:
        raise PlanError(f"{others[0]!r} only looks rows up, but is no unit of storages")


def _free(model: nn.Module, args: object, output: object, units: list[nn.Module]) -> None:
    """Where no backward will come, free what forward has kept for it: it would outlive a step."""
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(output)):
        for unit in units:
            cast(FSDPModule, unit).reshard()
