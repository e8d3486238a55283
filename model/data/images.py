"""Image files to grids and patches, through the image processor that a model folder names."""

import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple

from jaxtyping import Float
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import AutoImageProcessor

from model.config import Config
from vlshard.plan import Grid

SETTINGS = ("preprocessor_config.json", "processor_config.json")
QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
EXIF_KEYWORDS = (b"Raw profile type exif", b"XML:com.adobe.xmp")


class ImageError(ValueError):
    """An image that cannot be prepared for the model.

    Attributes:
      path: the image file, or the model folder if the fault is there.
      reason: what was found and what was expected.
    """

    def __init__(self, path: str | Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class ImageReader:
    """Reads image files the way a model folder's image processor wants them.

    The processor is loaded when the first image is read, so that a folder without one serves data
    without images. May be used by several threads at once.

    Args:
      folder: Hugging Face model folder.
      config: config of the model; the processor's patch sizes must be the same.
    """

    def __init__(self, folder: str | Path, config: Config):
        self.folder = Path(folder)
        self.config = config
        self._processor: Any = None
        self._lock = Lock()

    @property
    def processor(self) -> Any:
        """The image processor, checked against the config.

        Raises: ImageError naming the folder if it has none or if its patches are other ones than
          the model's.
        """
        with self._lock:
            if self._processor is None:
                self._processor = _load_processor(self.folder, self.config)
            return self._processor

    def grid(self, path: str | Path) -> Grid:
        """Size of an image as the model sees it, out of the file's header; no pixel is decoded.

        Args:
          path: the image file.
        Returns: (1, rows, columns) [patches before merging].
        Raises: ImageError if the file is missing, is no image, or has a shape that the processor
          refuses.
        """
        processor = self.processor
        with _opened(path) as (file, image):
            return _grid(processor, *_upright_size(file, image), path)

    def patches(self, path: str | Path) -> Float[Tensor, "rows p"]:
        """Decode an image and cut it into normalised patches, in merge-block order.

        Args:
          path: the image file.
        Returns: float32, as many rows as the grid has patches.
        Raises: ImageError as ``grid``, and if the pixels are damaged or are not what the header
          says.
        Source: transformers 5.24, image_utils.load_image and Qwen2VLImageProcessorPil.
        """
        return self.patches_of([path])[0]

    def patches_of(self, paths: Sequence[str | Path]) -> list[Float[Tensor, "rows p"]]:
        """``patches`` of several images; the processor is called once for all of one kind.

        Args:
          paths: the image files.
        Returns: one tensor per image, in order.
        Raises: ImageError as ``patches``, of the first image that is at fault.
        """
        opened = [self._decode(path) for path in paths]
        found: dict[int, Tensor] = {}
        for fits in (True, False):
            chosen = [i for i, image in enumerate(opened) if image.fits == fits]
            # An image that has its size already gets the same values sooner without resizing.
            options = {"do_resize": False} if fits else {}
            found |= zip(chosen, self._process([opened[i] for i in chosen], options), strict=True)
        return [found[i] for i in range(len(opened))]

    def _decode(self, path: str | Path) -> "Decoded":
        processor = self.processor
        with _opened(path) as (file, image):
            size = _upright_size(file, image)
            grid = _grid(processor, *size, path)
            rgb = _to_rgb(ImageOps.exif_transpose(image))
        fits = size == (grid[1] * processor.patch_size, grid[2] * processor.patch_size)
        return Decoded(path, grid, rgb, fits)

    def _process(self, images: "Sequence[Decoded]", options: dict[str, Any]) -> list[Tensor]:
        """Patches of decoded images, all with the same options."""
        if not images:
            return []
        try:
            pictures = [image.rgb for image in images]
            batch = self.processor(images=pictures, return_tensors="pt", **options)
        except Exception as error:  # whatever odd settings lead to
            if len(images) > 1:
                return [rows for image in images for rows in self._process([image], options)]
            reason = f"the image processor of {self.folder} refuses it: {error}"
            raise ImageError(images[0].path, reason) from error
        for image, found in zip(images, batch["image_grid_thw"].tolist(), strict=True):
            if tuple(found) != image.grid:
                reason = f"decoded to a grid of {tuple(found)}, the header says {image.grid}"
                raise ImageError(image.path, reason)
        sizes = [image.grid[1] * image.grid[2] for image in images]
        return list(batch["pixel_values"].float().split(sizes))


class Decoded(NamedTuple):
    """An image in memory: its file, its grid, its colours, and whether it needs no resizing."""

    path: str | Path
    grid: Grid
    rgb: Image.Image
    fits: bool


def _grid(processor: Any, height: int, width: int, path: str | Path) -> Grid:
    """Grid that the processor makes of an image of a size [pixels]."""
    patch, merge = processor.patch_size, processor.merge_size
    factor = patch * merge
    if processor.do_resize:
        smart_resize = sys.modules[type(processor).__module__].smart_resize
        size = processor.size
        pixels = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        try:
            height, width = smart_resize(height, width, factor=factor, **pixels)
        except ValueError as error:
            raise ImageError(path, f"{width}x{height} pixels: {error}") from error
    if min(height, width) < factor or height % factor or width % factor:
        raise ImageError(path, f"{width}x{height} pixels are no multiple of {factor}x{factor}")
    return (1, height // patch, width // patch)


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[IO[bytes], Image.Image]]:
    """Open an image file lazily; every fault inside the block is an ImageError."""
    try:
        with open(path, "rb") as file, Image.open(file) as image:
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and image.width * image.height > limit:
                raise ImageError(path, _too_large(f"{image.width}x{image.height} pixels"))
            yield file, image
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError(path, "no such image file") from error
    except UnidentifiedImageError as error:
        raise ImageError(path, "not an image in a format that Pillow knows") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(path, _too_large(str(error))) from error
    except Exception as error:  # decoders raise anything on damaged data
        raise ImageError(path, f"cannot be decoded: {error}") from error


def _too_large(found: str) -> str:
    """Why an image that may be a decompression bomb is refused."""
    return f"{found}; expected at most {Image.MAX_IMAGE_PIXELS} (PIL.Image.MAX_IMAGE_PIXELS)"


def _upright_size(file: IO[bytes], image: Image.Image) -> tuple[int, int]:
    """Height and width after the turn that EXIF asks for, out of the header."""
    width, height = image.size
    if image.format == "TIFF":  # Pillow has swapped them already
        return height, width
    if image.format == "PNG" and not _exif_behind_pixels(file):
        exif = Image.Image.getexif(image)  # PNG's own method would decode the pixels
    else:
        exif = image.getexif()
    turned = exif.get(ExifTags.Base.Orientation) in QUARTER_TURNS
    return (width, height) if turned else (height, width)


def _exif_behind_pixels(file: IO[bytes]) -> bool:
    """Whether a PNG file keeps EXIF data where Pillow sees it only after decoding."""
    before = file.tell()
    file.seek(8)
    pixels_passed = found = False
    while not found and len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        after = file.tell() + length + 4
        if pixels_passed:
            is_text = kind in TEXT_CHUNKS and file.read(32).startswith(EXIF_KEYWORDS)
            found = kind == b"eXIf" or is_text
        pixels_passed |= kind == b"IDAT"
        file.seek(after)
    file.seek(before)
    return found


def _to_rgb(image: Image.Image) -> Image.Image:
    """Three colours; transparency is dropped, as transformers' loading does."""
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # the same colours, without Pillow's warning
    return image.convert("RGB")


def _load_processor(folder: Path, config: Config) -> Any:
    """Load a folder's image processor and check it against the model's config."""
    if not any((folder / name).is_file() for name in SETTINGS):
        raise ImageError(folder, f"no {SETTINGS[0]}; the data has images, so one is needed")
    try:
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a broken or foreign settings file leads to
        raise ImageError(folder, f"its image processor cannot be loaded: {error}") from error
    kind = type(processor)
    if not hasattr(sys.modules[kind.__module__], "smart_resize"):
        raise ImageError(folder, f"{kind.__name__} is not an image processor of this model")
    vision = config.vision
    wanted = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    found = {name: getattr(processor, name, None) for name in wanted}
    if found != wanted:
        raise ImageError(folder, f"the image processor has {found}, config.json {wanted}")
    if vision.in_channels != 3:
        raise ImageError(folder, f"images have 3 channels, config.json asks {vision.in_channels}")
    return processor
