"""Parameters at rest: sharded or copied over mesh axes by FSDP2, their gradients plain sums.

`declared` is what a plan says of them, `shard_model` puts it on a model, `fsdp_collectives`
carries FSDP2's traffic on the CPU, `norm` sums and clips gradients over parameters of mixed
meshes.
"""

from vlshard.storage.declared import Storage, fsdp, replicate
from vlshard.storage.norm import clip_gradients, grad_norm, local_part
from vlshard.storage.shard_model import shard_model

__all__ = [
    "Storage",
    "clip_gradients",
    "fsdp",
    "grad_norm",
    "local_part",
    "replicate",
    "shard_model",
]
