"""A model's config: read from a Hugging Face folder, checked, and what a plan asks of it.

`config` is the whole, `sections` its vision and text parts, `json_settings` reads values with
messages that name the key, `shapes` gives every parameter's shape.
"""

from model.config.config import ARCHITECTURE, Config, ConfigError, load_config
from model.config.sections import TextConfig, VisionConfig
from model.config.shapes import Shape

__all__ = [
    "ARCHITECTURE",
    "Config",
    "ConfigError",
    "Shape",
    "TextConfig",
    "VisionConfig",
    "load_config",
]
