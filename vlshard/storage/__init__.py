"""Parameters at rest: sharded or copied over mesh axes by FSDP2, their gradients plain sums.

`declared` is what a plan says of them, `parameters` what follows for each and `parts` which part of
it a rank computes with; `rectangles` says which blocks of the whole it stores, `entries` how these
are named in a checkpoint, `saved` writes and reads them. `shard_model` puts storage on a model,
with what FSDP2 has no public name for in `fsdp2`; `fsdp_collectives` carries FSDP2's traffic on the
CPU, `norm` sums and clips gradients over parameters of mixed meshes.
"""

from vlshard.storage.declared import Storage, fsdp, replicate
from vlshard.storage.entries import FusedDims, Held, Key, Tensors, WrittenOut, held_entries
from vlshard.storage.norm import clip_gradients, grad_norm, local_part
from vlshard.storage.parameters import (
    StoredParameter,
    counts_here,
    stored_parameters,
    unit_of,
)
from vlshard.storage.parts import Block, Parts
from vlshard.storage.rectangles import stored_block, stored_rectangles
from vlshard.storage.saved import (
    FileFacts,
    SavedError,
    SavedFolder,
    file_faults,
    load_tensors,
    save_tensors,
    saved_tensors,
)
from vlshard.storage.shard_model import shard_model

__all__ = [
    "Block",
    "FileFacts",
    "FusedDims",
    "Held",
    "Key",
    "Parts",
    "SavedError",
    "SavedFolder",
    "Storage",
    "StoredParameter",
    "Tensors",
    "WrittenOut",
    "clip_gradients",
    "counts_here",
    "file_faults",
    "fsdp",
    "grad_norm",
    "held_entries",
    "load_tensors",
    "local_part",
    "replicate",
    "save_tensors",
    "saved_tensors",
    "shard_model",
    "stored_block",
    "stored_parameters",
    "stored_rectangles",
    "unit_of",
]
