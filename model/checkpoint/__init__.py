"""Hugging Face folders, in and out: weights bit for bit, in safetensors only.

`folder` and `headers` say what is there and whether it fits, `save_load` reads and writes it under
any plan, `export` makes the folder around the weights and `place` gives it its name. `facts` tells
weights from others. `steps` are the checkpoints that a run goes on from; ``python -m
model.checkpoint`` exports one or says what is in it.
"""

from model.checkpoint.export import COST_FILE, RECORD_FILE
from model.checkpoint.facts import file_facts, weights_facts
from model.checkpoint.folder import check_checkpoint
from model.checkpoint.headers import CheckpointError, has_weights, unread_weights
from model.checkpoint.place import check_target, restore, try_target
from model.checkpoint.save_load import load_checkpoint, save_checkpoint

__all__ = [
    "COST_FILE",
    "RECORD_FILE",
    "CheckpointError",
    "check_checkpoint",
    "check_target",
    "file_facts",
    "has_weights",
    "load_checkpoint",
    "restore",
    "save_checkpoint",
    "try_target",
    "unread_weights",
    "weights_facts",
]
