"""The modules that own weights, under their Hugging Face names, and call the cores.

`qwen3_vl_moe` is the model, `adapters` its blocks; `init` fills new weights, `shards` writes into
the part of a parameter that this rank stores.
"""

from model.modules.adapters import VisionBlock
from model.modules.init import fill
from model.modules.qwen3_vl_moe import Qwen3VLMoe, refuse_expert_widths
from model.modules.shards import Block, Target, named_parameters, write_block

__all__ = [
    "Block",
    "Qwen3VLMoe",
    "Target",
    "VisionBlock",
    "fill",
    "named_parameters",
    "refuse_expert_widths",
    "write_block",
]
