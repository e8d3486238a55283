"""Typed shard specs: write down where a tensor lives, and let a planner move it."""

from vlshard.adapt import shard_model
from vlshard.advise import Advice, advise_patches
from vlshard.boundaries import Boundaries, Pending, local_boundaries
from vlshard.bridges import from_dtensor, to_dtensor
from vlshard.errors import LayoutError, PlanError, ShardError, SpecError
from vlshard.flight import start
from vlshard.header import SampleFacts, Share, StepHeader
from vlshard.layout import Layout, layout
from vlshard.mesh import Mesh, MeshShape
from vlshard.mesh_in_use import use_mesh
from vlshard.packing import Packing
from vlshard.plan import BoundPlan, Plan, load_plan
from vlshard.program import Program
from vlshard.pytree import pytree
from vlshard.reshard import reshard
from vlshard.settings import fsdp, gather, hybrid, replicate, ring, ulysses
from vlshard.sharded import Sharded
from vlshard.spec import Spec, spec
from vlshard.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
    ZeroPad,
)
from vlshard.transition import transition

__all__ = [
    "Advice",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BoundPlan",
    "Boundaries",
    "Exchange",
    "Layout",
    "LayoutError",
    "Mesh",
    "MeshShape",
    "Packing",
    "Pending",
    "Plan",
    "PlanError",
    "Program",
    "ReduceScatter",
    "SampleFacts",
    "ShardError",
    "Sharded",
    "Share",
    "Slice",
    "Spec",
    "SpecError",
    "Step",
    "StepHeader",
    "ZeroPad",
    "advise_patches",
    "from_dtensor",
    "fsdp",
    "gather",
    "hybrid",
    "layout",
    "load_plan",
    "local_boundaries",
    "pytree",
    "replicate",
    "reshard",
    "ring",
    "shard_model",
    "spec",
    "start",
    "to_dtensor",
    "transition",
    "ulysses",
    "use_mesh",
]
