"""Stores a model's parameters as declared: FSDP2 on every unit, gradients as plain sums."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from vlshard.comm import Mesh
from vlshard.language import PlanError, nearest
from vlshard.pytree import tree_leaves
from vlshard.storage.declared import Storage
from vlshard.storage.fsdp2 import ShardPlacementResult, mesh_info, plain_sums, set_collectives
from vlshard.storage.fsdp_collectives import Buffers, GlooAllGather, GlooReduceScatter
from vlshard.storage.parameters import StoredParameter, stored_parameters
from vlshard.storage.parts import Parts

Where = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def shard_model(
    model: nn.Module,
    storages: Mapping[str, Storage],
    mesh: Mesh,
    *,
    parts: Parts | None = None,
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
      parts: the parameters that are cut for compute: each rank computes with its part, and
        ``storages`` say how that is stored. ``BoundPlan.parts`` gives a plan's.
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
    parts = parts or Parts()
    stored = stored_parameters(_shapes(model), units, mesh, parts)
    cut_parameters(model, parts)
    meshes = _meshes([*stored.values(), *map(_default, units.values())], mesh, device_type)
    placed = _placement(model, stored, meshes)
    # What forward uses last, backward uses first: it is kept in between.
    kept = next((unit for unit in reversed(units) if unit), "")
    for unit in units:
        module, over = model.get_submodule(unit), meshes[_where(_default(units[unit]))]
        free = False if unit == kept else None  # None: FSDP2 frees all but the root
        sharded = fully_shard(
            module,
            mesh=over,
            mp_policy=policy,
            reshard_after_forward=free,
            shard_placement_fn=placed,
        )
        sharded.set_unshard_in_backward(unit not in lookups)
    stay = [model.get_submodule(unit) for unit in {kept, ""}]
    model.register_forward_hook(partial(_free, units=stay))
    buffers = Buffers()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            plain_sums(module)
            if device_type == "cpu":
                set_collectives(
                    module,
                    lambda: GlooAllGather(buffers),
                    lambda: GlooReduceScatter(buffers),
                )


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


def cut_parameters(model: nn.Module, parts: Parts) -> None:
    """Give each parameter that is cut for compute the shape of this rank's part.

    Args:
      model: on the meta device.
      parts: the parameters that are cut.
    Raises: ValueError if a parameter has values already.
    """
    for name in parts.layouts:
        whole = model.get_parameter(name)
        if not whole.is_meta:
            raise ValueError(f"{name} has values: a model is cut on the meta device, then filled")
        owner, _, leaf = name.rpartition(".")
        local = whole.new_empty(parts.shape(name, tuple(whole.shape)))
        cut = nn.Parameter(local, whole.requires_grad)
        model.get_submodule(owner).register_parameter(leaf, cut)


def _placement(
    model: nn.Module, stored: Mapping[str, StoredParameter], meshes: Mapping[Where, DeviceMesh]
) -> Callable[[nn.Parameter], ShardPlacementResult]:
    """Where FSDP2 is to keep each parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    infos = {where: mesh_info(mesh) for where, mesh in meshes.items()}

    def place(parameter: nn.Parameter) -> ShardPlacementResult:
        how = stored[names[parameter]]
        return ShardPlacementResult(Shard(how.dim), infos[_where(how)])

    return place


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _default(storage: Storage) -> StoredParameter:
    """What a unit declares, for a parameter that is whole."""
    return StoredParameter((), storage.shard, storage.replicate)


def _where(stored: StoredParameter) -> Where:
    """The axes that tell meshes apart."""
    return stored.shard, stored.replicate, stored.beside


def _meshes(
    stored: Iterable[StoredParameter], mesh: Mesh, device_type: str
) -> dict[Where, DeviceMesh]:
    """The meshes that parameters live on, made in one order on every rank."""
    return {
        (shard, replicate, beside): mesh.device_mesh(
            shard, replicate, device_type=device_type, beside=beside
        )
        for shard, replicate, beside in sorted(set(map(_where, stored)))
    }
