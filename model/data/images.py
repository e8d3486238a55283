"""Image files to grids and patches, through the image processor that a model folder names."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple

from jaxtyping import Float
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from model.config import Config, odd_file
from model.data.colours import ColourError, mode_fault, range_of, to_rgb
from model.data.processor import ImageError, grid_of, load_processor, most_pixels, too_large
from vlshard.language import clipped
from vlshard.plan import Grid

QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
EXIF_KEYWORDS = (b"Raw profile type exif", b"XML:com.adobe.xmp")


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
                self._processor = load_processor(self.folder, self.config)
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
            return grid_of(processor, *_upright_size(file, image), path)

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
            grid = grid_of(processor, *size, path)
            rgb = to_rgb(ImageOps.exif_transpose(image), *range_of(image))
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
            reason = f"the image processor of {self.folder} refuses it: {clipped(error)}"
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


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[IO[bytes], Image.Image]]:
    """Open an image file lazily; every fault inside the block is an ImageError."""
    try:
        odd = odd_file(path)
        if odd is not None:
            raise ImageError(path, odd)
        with open(path, "rb") as file, Image.open(file) as image:
            fault = too_large(image.width, image.height) or mode_fault(image)
            if fault is not None:
                raise ImageError(path, fault)
            yield file, image
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError(path, "no such image file") from error
    except UnidentifiedImageError as error:
        raise ImageError(path, "not an image in a format that Pillow knows") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(path, f"{error}; expected at most {most_pixels()}") from error
    except ColourError as error:
        raise ImageError(path, str(error)) from error
    except Exception as error:  # decoders raise anything on damaged data
        raise ImageError(path, f"cannot be decoded: {clipped(error)}") from error


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
