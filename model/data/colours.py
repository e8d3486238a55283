"""Pictures of any mode to three colours of eight bits, without loss of range or transparency."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

SIGNED = 2  # sample format of TIFF
WHITE = (255, 255, 255, 255)
SIXTEEN_BITS = ("PNG", "PPM")  # formats whose 32-bit pictures hold 16 bits at most
HINT = "save it with 8 or 16 bits a channel"


class ColourError(ValueError):
    """A picture whose values do not say which of them is white."""


def mode_fault(image: Image.Image) -> str | None:
    """Why a picture's mode has no known range, out of its header; None if it has one."""
    if image.mode == "I" and image.format not in SIXTEEN_BITS:
        return f"mode I: 32-bit integers do not say which value is white; {HINT}"
    if isinstance(image, TiffImagePlugin.TiffImageFile) and image.mode != "F":
        if SIGNED in image.tag_v2.get(TiffImagePlugin.SAMPLEFORMAT, ()):
            return f"signed integers do not say which value is black; {HINT}"
    return None


def range_of(image: Image.Image) -> tuple[int, bool]:
    """The largest value of a picture of 16-bit integers, and whether it is black (TIFF has both).

    Args:
      image: as it was opened, with its format's tags.
    """
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return 2**16 - 1, False
    bits = image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (16,))
    photometric = image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION, 1)
    return 2 ** int(bits[0]) - 1, photometric == 0


def to_rgb(image: Image.Image, largest: int = 2**16 - 1, inverted: bool = False) -> Image.Image:
    """Three colours of eight bits.

    Args:
      image: a decoded picture of any mode.
      largest: the largest value that an integer of more than eight bits can have.
      inverted: whether that value is black.
    Returns: the picture in mode RGB; where it is transparent, a white ground shows through.
    Raises: ColourError if values of a floating picture are outside of 0 to 1.
    Source: transformers 5.24, image_transforms.convert_to_rgb, for pictures of eight bits.
    """
    transparency = image.info.get("transparency")
    if image.mode == "F":
        return _grey(_scaled(np.asarray(image)))
    if image.mode == "I" or image.mode.startswith("I;"):
        values = np.asarray(image).astype(np.int64)
        grey = (np.clip(values, 0, largest) * 255 + largest // 2) // largest
        grey = 255 - grey if inverted else grey
        clear = values == transparency if isinstance(transparency, int) else False
        return _grey(np.where(clear, 255, grey))
    if image.mode in ("LA", "PA", "La", "RGBA", "RGBa") or transparency is not None:
        return _on_white(image)
    return image.convert("RGB")


def _scaled(values: NDArray[Any]) -> NDArray[Any]:
    """Floating values as integers up to 255."""
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
        low, high = float(values.min()), float(values.max())
        found = f"mode F: values from {low:.6g} to {high:.6g}, expected 0 to 1"
        raise ColourError(f"{found}; {HINT}")
    return np.rint(values * 255)


def _grey(values: NDArray[Any]) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """What is seen of a picture before white."""
    if image.mode == "La":
        image = image.convert("LA")
    whole = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", whole.size, WHITE), whole).convert("RGB")
