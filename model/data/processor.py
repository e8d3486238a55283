"""The image processor that a model folder names: loaded, checked, and which grids it makes."""

import sys
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoImageProcessor

from model.config import Config, read_json
from vlshard.language import clipped, clipped_path
from vlshard.plan import Grid

SETTINGS = ("preprocessor_config.json", "processor_config.json")


class ImageError(ValueError):
    """An image that cannot be prepared for the model.

    Attributes:
      path: the image file, or the model folder if the fault is there.
      reason: what was found and what was expected.
    """

    def __init__(self, path: str | Path, reason: str):
        super().__init__(f"{clipped_path(path)}: {reason}")
        self.path = path
        self.reason = reason


def load_processor(folder: Path, config: Config) -> Any:
    """Load a folder's image processor and check it against the model's config.

    Raises: ImageError naming the folder if it has none, or one that does not fit the model.
    """
    found = [folder / name for name in SETTINGS if (folder / name).exists()]
    if not found:
        raise ImageError(folder, f"no {SETTINGS[0]}; the data has images, so one is needed")
    for path in found:
        try:
            read_json(path)
        except OSError as error:
            raise ImageError(path, str(error.strerror)) from error
        except (ValueError, RecursionError) as error:
            raise ImageError(path, f"no valid JSON: {clipped(error)}") from error
    try:
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a broken or foreign settings file leads to
        reason = f"its image processor cannot be loaded: {clipped(error)}"
        raise ImageError(folder, reason) from error
    kind = type(processor)
    if not hasattr(sys.modules[kind.__module__], "smart_resize"):
        raise ImageError(folder, f"{kind.__name__} is not an image processor of this model")
    fault = _patch_fault(processor, config) or _size_fault(processor) or _value_fault(processor)
    if fault is not None:
        raise ImageError(folder, fault)
    return processor


def grid_of(processor: Any, height: int, width: int, path: str | Path) -> Grid:
    """Grid that a processor makes of an image of a size [pixels].

    Raises: ImageError if it makes none, or one larger than an image may be.
    """
    patch, merge = processor.patch_size, processor.merge_size
    factor = patch * merge
    if processor.do_resize:
        smart_resize = sys.modules[type(processor).__module__].smart_resize
        size = processor.size
        pixels = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        found = f"{width}x{height} pixels"
        try:
            height, width = smart_resize(height, width, factor=factor, **pixels)
        except ValueError as error:
            raise ImageError(path, f"{found}: {error}") from error
        fault = too_large(width, height)
        if fault is not None:
            raise ImageError(path, f"{found}, resized to {fault}")
    if min(height, width) < factor or height % factor or width % factor:
        raise ImageError(path, f"{width}x{height} pixels are no multiple of {factor}x{factor}")
    return (1, height // patch, width // patch)


def most_pixels() -> str:
    """The limit of an image's size, and where it comes from."""
    return f"{Image.MAX_IMAGE_PIXELS} (PIL.Image.MAX_IMAGE_PIXELS)"


def too_large(width: int, height: int) -> str | None:
    """Why an image of a size may not be decoded, or None."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is None or width * height <= limit:
        return None
    return f"{width}x{height} pixels; expected at most {most_pixels()}"


def _patch_fault(processor: Any, config: Config) -> str | None:
    """How a processor's patches differ from the model's."""
    vision = config.vision
    wanted = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    found = {name: getattr(processor, name, None) for name in wanted}
    if found != wanted:
        return f"the image processor has {clipped(found)}, config.json {wanted}"
    if vision.in_channels != 3:
        return f"images have 3 channels, config.json asks {vision.in_channels}"
    return None


def _size_fault(processor: Any) -> str | None:
    """What is wrong with the fewest and the most pixels to which images are resized."""
    if not processor.do_resize:
        return None
    low, high = (getattr(processor.size, key, None) for key in ("shortest_edge", "longest_edge"))
    if not (_is_size(low) and _is_size(high)):
        given = {key: value for key, value in dict(processor.size).items() if value is not None}
        return (
            f"the image processor has size {clipped(given)}, expected shortest_edge and "
            "longest_edge: the fewest and the most pixels of an image, or do_resize false"
        )
    if low > high:
        return (
            f"the image processor has shortest_edge (or min_pixels) {low} above longest_edge (or "
            f"max_pixels) {high}: an image cannot have at least the one and at most the other"
        )
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and low > limit:
        return f"the image processor has shortest_edge {low}, expected at most {most_pixels()}"
    return None


def _is_size(value: Any) -> bool:
    """Whether a value is a number of pixels."""
    return isinstance(value, Real) and not isinstance(value, bool) and 1 <= value < float("inf")


def _value_fault(processor: Any) -> str | None:
    """Whether the settings make numbers that are none."""
    spread = processor.image_std if processor.do_normalize else 1.0
    if any(value == 0 for value in _numbers(spread)):
        return f"the image processor divides by image_std {clipped(spread)}, expected no zero"
    names = ["rescale_factor"] * bool(processor.do_rescale)
    names += ["image_mean", "image_std"] * bool(processor.do_normalize)
    for name in names:
        values = getattr(processor, name)
        if not all(isfinite(value) for value in _numbers(values)):
            return f"the image processor has {name} {clipped(values)}, expected finite numbers"
    return None


def _numbers(values: Any) -> list[Any]:
    """The numbers of a setting that is one or several."""
    several = list(values) if isinstance(values, list | tuple) else [values]
    return [value for value in several if isinstance(value, Real)]
