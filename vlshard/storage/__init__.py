"""Parameters at rest: sharded or copied over mesh axes by FSDP2, their gradients plain sums.

`declared` is what a plan says of them, `parameters` what follows for each and `parts` which part of
it a rank computes with; `shard_model` puts it on a model, with what FSDP2 has no public name for in
`fsdp2`; `fsdp_collectives` carries FSDP2's traffic on the CPU, `norm` sums and clips gradients over
parameters of mixed meshes.
"""

from vlshard.storage.declared import Storage, fsdp, replicate
from vlshard.storage.norm import clip_gradients, grad_norm, local_part
from vlshard.storage.parameters import (
    StoredParameter,
    counts_here,
    stored_parameters,
    unit_of,
)
from vlshard.storage.parts import Block, Parts
from vlshard.storage.shard_model import shard_model

__all__ = [
    "Block",
    "Parts",
    "Storage",
    "StoredParameter",
    "clip_gradients",
    "counts_here",
    "fsdp",
    "grad_norm",
    "local_part",
    "replicate",
    "shard_model",
    "stored_parameters",
    "unit_of",
]
