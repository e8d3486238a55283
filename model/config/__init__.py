"""A model's config: read from a Hugging Face folder, checked, and what a plan asks of it.

`config` is the whole, `sections` its vision and text parts, `json_settings` reads values with
messages that name the key, `shapes` gives every parameter's shape, `files` says
what is read at all.
"""

from model.config.config import ARCHITECTURE, Config, ConfigError, load_config
from model.config.files import (
    OddFileError,
    json_text,
    odd_file,
    parse_json,
    read_json,
)
from model.config.sections import TextConfig, VisionConfig
from model.config.shapes import Shape

__all__ = [
    "ARCHITECTURE",
    "Config",
    "ConfigError",
    "OddFileError",
    "Shape",
    "TextConfig",
    "VisionConfig",
    "json_text",
    "load_config",
    "odd_file",
    "parse_json",
    "read_json",
]
