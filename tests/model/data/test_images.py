import json
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from transformers import AutoImageProcessor

from examples.digits_model import write_model
from model.config.config import load_config
from model.data.images import ImageError, ImageReader


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "model"
    write_model(path)
    return path


@pytest.fixture(scope="module")
def reader(folder):
    return ImageReader(folder, load_config(folder))


def reference(folder, path):
    """Grid and patches as transformers' processor makes them of a file's own picture, upright."""
    picture = ImageOps.exif_transpose(Image.open(path))
    batch = AutoImageProcessor.from_pretrained(folder)(images=[picture], return_tensors="pt")
    return tuple(batch["image_grid_thw"][0].tolist()), batch["pixel_values"]


def colours(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8)


def rewritten(folder, target, name, **changes):
    """A copy of a model folder with other settings in one of its files."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    settings = json.loads((target / name).read_text())
    (target / name).write_text(json.dumps({**settings, **changes}))
    return target


def assert_as_transformers(reader, path):
    grid, patches = reference(reader.folder, path)
    assert reader.grid(path) == grid
    torch.testing.assert_close(reader.patches(path), patches, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((32, 32), (1, 2, 2)),
        ((64, 32), (1, 4, 2)),
        ((45, 70), (1, 2, 4)),
        ((8, 8), (1, 2, 2)),
        ((3, 500), (1, 2, 26)),
        ((500, 300), (1, 20, 12)),
    ],
)
def test_sizes_are_those_of_transformers(reader, tmp_path, size, grid):
    Image.fromarray(colours(*size)).save(tmp_path / "a.png")
    assert reader.grid(tmp_path / "a.png") == grid
    assert_as_transformers(reader, tmp_path / "a.png")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_every_mode_becomes_rgb(reader, tmp_path, mode):
    name = "a.tiff" if mode in ("CMYK", "YCbCr") else "a.png"
    image = Image.fromarray(colours(40, 72, 4), "RGBA")
    if mode != "RGBA":
        image = image.convert("RGB").convert(mode)
    image.save(tmp_path / name)
    assert_as_transformers(reader, tmp_path / name)


def test_palette_with_transparency_is_seen_before_white(reader, tmp_path):
    image = Image.fromarray(colours(32, 64)).convert("P", palette=Image.Palette.ADAPTIVE)
    image.save(tmp_path / "a.png", transparency=bytes(range(0, 250, 10)))
    assert_as_transformers(reader, tmp_path / "a.png")


BLACK, WHITE = -0.25 / 0.35, 0.75 / 0.35  # values 0 and 255 behind mean and deviation


def half_clear(alpha, mode):
    """Left half red, right half black of some opacity; as mode LA, the left is grey."""
    pixels = np.zeros((64, 64, 4), np.uint8)
    pixels[:, :32], pixels[:, 32:, 3] = (255, 0, 0, 255), alpha
    image = Image.fromarray(pixels)
    if mode != "P":
        return image.convert(mode)
    palette = Image.fromarray((pixels[..., 0] // 255).astype(np.uint8), "L").convert("P")
    palette.putpalette([0, 0, 0, 255, 0, 0])
    return palette


@pytest.mark.parametrize("mode", ["RGBA", "LA", "WebP", "P"])
@pytest.mark.parametrize(("alpha", "value"), [(0, WHITE), (128, 0.708683), (255, BLACK)])
def test_transparent_parts_are_seen_before_white(reader, tmp_path, mode, alpha, value):
    path = tmp_path / ("a.webp" if mode == "WebP" else "a.png")
    options = {"lossless": True, "exact": True} if mode == "WebP" else {}
    options = {"transparency": bytes([alpha, 255])} if mode == "P" else options
    half_clear(alpha, "RGBA" if mode == "WebP" else mode).save(path, **options)
    red = reader.patches(path)[:, :256].reshape(2, 2, 2, 2, 16, 16)  # units, then patches in them
    torch.testing.assert_close(red[:, 1], torch.full_like(red[:, 1], value), rtol=0, atol=1e-6)
    if mode != "LA":
        torch.testing.assert_close(red[:, 0], torch.full_like(red[:, 0], WHITE), rtol=0, atol=1e-6)
    assert_as_transformers(reader, path)


GREYS = 16 * np.arange(64 * 64).reshape(64, 64)  # 16 bits: 32,768 at row 32, column 0


def write_pgm(path, values, largest):
    path.write_bytes(b"P5 64 64 %d\n" % largest + values.astype(">u2").tobytes())


@pytest.mark.parametrize(
    ("name", "white", "write"),
    [
        ("a.png", 65535, lambda path: Image.fromarray(GREYS.astype(np.uint16)).save(path)),
        ("a.tiff", 65535, lambda path: Image.fromarray(GREYS.astype(np.uint16)).save(path)),
        ("a.tiff", 65535, lambda path: Image.fromarray(GREYS.astype(">u2")).save(path)),
        ("a.pgm", 65535, lambda path: write_pgm(path, GREYS, 65535)),
        ("a.pgm", 16 * 4095, lambda path: write_pgm(path, GREYS // 16, 4095)),
        ("a.tiff", 1e5, lambda path: Image.fromarray((GREYS / 1e5).astype(np.float32)).save(path)),
    ],
)
def test_more_than_eight_bits_are_scaled_by_their_range(reader, tmp_path, name, white, write):
    write(tmp_path / name)
    rows = reader.patches(tmp_path / name).reshape(2, 2, 2, 2, 3, 2, 16, 16)
    picture = rows[:, :, :, :, 0, 0].permute(0, 2, 4, 1, 3, 5).reshape(64, 64)
    expected = (np.rint(GREYS / white * 255) / 255 - 0.25) / 0.35
    torch.testing.assert_close(picture, torch.tensor(expected, dtype=torch.float32))


def test_sixteen_bits_may_have_a_clear_value_or_begin_with_white(reader, tmp_path):
    values = GREYS.astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png", transparency=0)
    Image.fromarray(values).save(tmp_path / "a.tiff", tiffinfo={262: 0})
    clear, white = (reader.patches(tmp_path / name)[0, 0].item() for name in ("a.png", "a.tiff"))
    assert clear == pytest.approx(WHITE, abs=1e-6)
    assert white == pytest.approx(WHITE, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            GREYS.astype(np.int32),
            "mode I: 32-bit integers do not say which value is white; save it with 8 or 16 bits a "
            "channel",
        ),
        (
            GREYS.astype(np.float32),
            "mode F: values from 0 to 65520, expected 0 to 1; save it with 8 or 16 bits a channel",
        ),
        (
            np.full((64, 64), np.nan, np.float32),
            "mode F: values from nan to nan, expected 0 to 1; save it with 8 or 16 bits a channel",
        ),
    ],
)
def test_values_without_a_range_are_refused(reader, tmp_path, values, reason):
    path = tmp_path / "a.tiff"
    Image.fromarray(values).save(path)
    with pytest.raises(ImageError) as error:
        reader.patches(path)
    assert str(error.value) == f"{path}: {reason}"


def test_signed_integers_are_refused(reader, tmp_path):
    path = tmp_path / "a.tiff"
    Image.new("L", (64, 64)).save(path, tiffinfo={339: 2})
    with pytest.raises(ImageError) as error:
        reader.grid(path)
    assert str(error.value) == (
        f"{path}: signed integers do not say which value is black; save it with 8 or 16 bits a "
        "channel"
    )


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_respected(reader, tmp_path, name, orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(colours(32, 96)).save(tmp_path / name, exif=exif)
    assert reader.grid(tmp_path / name) == ((1, 2, 6) if orientation < 5 else (1, 6, 2))
    assert_as_transformers(reader, tmp_path / name)


def test_orientation_behind_the_pixels_is_respected(reader, tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(colours(32, 96)).save(path)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    chunk = b"eXIf" + exif.tobytes()[6:]
    late = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    content = path.read_bytes()
    end = content.rindex(b"IEND") - 4
    path.write_bytes(content[:end] + late + content[end:])
    assert reader.grid(path) == (1, 6, 2)
    assert_as_transformers(reader, path)


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_only_decoding_meets_damaged_pixels(reader, tmp_path, name):
    path = tmp_path / name
    Image.fromarray(colours(64, 64)).save(path)
    path.write_bytes(path.read_bytes()[:1200])
    assert reader.grid(path) == (1, 4, 4)
    with pytest.raises(ImageError) as error:
        reader.patches(path)
    assert str(error.value).startswith(f"{path}: cannot be decoded: image file is truncated")


def write_text(path):
    path.write_text("no image")


def write_long(path):
    Image.fromarray(colours(1, 201, 1)).save(path)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: None, "no such image file"),
        (write_text, "not an image in a format that Pillow knows"),
        (lambda path: path.mkdir(), "found a directory, expected a file"),
        (os.mkfifo, "found a pipe, expected a file"),
        (
            write_long,
            "201x1 pixels: absolute aspect ratio must be smaller than 200, got 201.0",
        ),
    ],
)
def test_faults_name_the_file(reader, tmp_path, write, reason):
    path = tmp_path / "a.png"
    write(path)
    for read in (reader.grid, reader.patches):
        with pytest.raises(ImageError) as error:
            read(path)
        assert str(error.value) == f"{path}: {reason.format(path=path)}"


@pytest.mark.parametrize(("limit", "found"), [(4000, "64x64 pixels"), (1000, "Image size (4096")])
def test_images_too_large_for_pillow_are_refused(reader, tmp_path, monkeypatch, limit, found):
    path = tmp_path / "a.png"
    Image.fromarray(colours(64, 64)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(ImageError) as error:
        reader.grid(path)
    assert f"expected at most {limit} (PIL.Image.MAX_IMAGE_PIXELS)" in str(error.value)


def test_a_folder_without_processor_is_refused_at_the_first_image(folder, tmp_path):
    config = load_config(folder)
    reader = ImageReader(tmp_path, config)
    with pytest.raises(ImageError) as error:
        reader.grid(tmp_path / "a.png")
    assert str(error.value) == (
        f"{tmp_path}: no preprocessor_config.json; the data has images, so one is needed"
    )


def test_a_processor_of_other_patches_is_refused(folder, tmp_path):
    other = rewritten(folder, tmp_path / "b", "preprocessor_config.json", patch_size=14)
    with pytest.raises(ImageError) as error:
        ImageReader(other, load_config(folder)).grid(tmp_path / "a.png")
    assert str(error.value) == (
        f"{other}: the image processor has {{'patch_size': 14, 'temporal_patch_size': 2, "
        "'merge_size': 2}, config.json {'patch_size': 16, 'temporal_patch_size': 2, "
        "'merge_size': 2}"
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"size": {"shortest_edge": 65536, "longest_edge": 32768}},
            "the image processor has shortest_edge (or min_pixels) 65536 above longest_edge (or "
            "max_pixels) 32768: an image cannot have at least the one and at most the other",
        ),
        (
            {"min_pixels": 65536, "max_pixels": 32768},
            "the image processor has shortest_edge (or min_pixels) 65536 above longest_edge (or "
            "max_pixels) 32768: an image cannot have at least the one and at most the other",
        ),
        (
            {"size": {"height": 64, "width": 64}},
            "the image processor has size {'height': 64, 'width': 64}, expected shortest_edge and "
            "longest_edge: the fewest and the most pixels of an image, or do_resize false",
        ),
        (
            {"size": {"shortest_edge": 1024}},
            "the image processor has size {'shortest_edge': 1024}, expected shortest_edge and "
            "longest_edge: the fewest and the most pixels of an image, or do_resize false",
        ),
        (
            {"size": {"shortest_edge": 10**12, "longest_edge": 10**12}},
            "the image processor has shortest_edge 1000000000000, expected at most 89478485 "
            "(PIL.Image.MAX_IMAGE_PIXELS)",
        ),
        (
            {"image_std": [0.35, 0, 0.35]},
            "the image processor divides by image_std (0.35, 0, 0.35), expected no zero",
        ),
        (
            {"image_std": [0.35, float("nan"), 0.35]},
            "the image processor has image_std (0.35, nan, 0.35), expected finite numbers",
        ),
        (
            {"rescale_factor": float("inf")},
            "the image processor has rescale_factor inf, expected finite numbers",
        ),
    ],
)
def test_settings_that_contradict_themselves_are_refused(folder, tmp_path, settings, reason):
    other = rewritten(folder, tmp_path / "b", "preprocessor_config.json", **settings)
    with pytest.raises(ImageError) as error:
        ImageReader(other, load_config(folder)).grid(tmp_path / "a.png")
    assert str(error.value) == f"{other}: {reason}"


def test_an_image_that_is_resized_beyond_the_limit_is_refused(folder, tmp_path, monkeypatch):
    size = {"shortest_edge": 65536, "longest_edge": 10**12}
    other = rewritten(folder, tmp_path / "b", "preprocessor_config.json", size=size)
    reader = ImageReader(other, load_config(folder))
    Image.new("L", (64, 64)).save(tmp_path / "a.png")
    assert reader.grid(tmp_path / "a.png") == (1, 16, 16)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60000)
    with pytest.raises(ImageError) as error:
        reader.grid(tmp_path / "a.png")
    assert str(error.value) == (
        f"{tmp_path / 'a.png'}: 64x64 pixels, resized to 256x256 pixels; expected at most 60000 "
        "(PIL.Image.MAX_IMAGE_PIXELS)"
    )


def test_settings_that_the_processor_refuses_name_the_folder(folder, tmp_path):
    other = rewritten(folder, tmp_path / "b", "preprocessor_config.json", image_mean=[0.5])
    path = tmp_path / "a.png"
    Image.fromarray(colours(64, 64)).save(path)
    with pytest.raises(ImageError) as error:
        ImageReader(other, load_config(folder)).patches(path)
    assert str(error.value).startswith(f"{path}: the image processor of {other} refuses it: ")


def test_a_processor_of_another_model_is_refused(folder, tmp_path):
    changes = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}}
    other = rewritten(folder, tmp_path / "b", "preprocessor_config.json", **changes)
    with pytest.raises(ImageError, match="is not an image processor of this model"):
        ImageReader(other, load_config(folder)).grid(tmp_path / "a.png")


def test_released_settings_are_understood(folder, tmp_path):
    size = {"longest_edge": 16777216, "shortest_edge": 65536}
    other = rewritten(folder, tmp_path / "b", "preprocessor_config.json", size=size)
    Image.fromarray(colours(64, 100)).save(tmp_path / "a.png")
    reader = ImageReader(other, load_config(folder))
    assert reader.grid(tmp_path / "a.png") == (1, 14, 20)
    assert_as_transformers(reader, tmp_path / "a.png")


def test_without_resizing_only_whole_units_are_taken(folder, tmp_path):
    other = rewritten(folder, tmp_path / "b", "preprocessor_config.json", do_resize=False)
    reader = ImageReader(other, load_config(folder))
    Image.fromarray(colours(64, 96)).save(tmp_path / "a.png")
    assert_as_transformers(reader, tmp_path / "a.png")
    Image.fromarray(colours(64, 100)).save(tmp_path / "b.png")
    with pytest.raises(ImageError) as error:
        reader.grid(tmp_path / "b.png")
    assert str(error.value) == f"{tmp_path / 'b.png'}: 100x64 pixels are no multiple of 32x32"


def test_threads_may_share_a_reader(folder, tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(24)]
    for i, path in enumerate(paths):
        Image.fromarray(colours(32 + 32 * (i % 3), 64, seed=i)).save(path)
    reader = ImageReader(folder, load_config(folder))
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(reader.patches, paths))
    for path, found in zip(paths, together, strict=True):
        torch.testing.assert_close(found, reference(folder, path)[1], rtol=0, atol=0)


def test_many_images_are_what_each_is_alone(reader, tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(4)]
    for i, (path, size) in enumerate(
        zip(paths, [(32, 64), (50, 70), (64, 32), (32, 32)], strict=True)
    ):
        Image.fromarray(np.roll(colours(*size), i)).save(path)
    alone = [reader.patches(path) for path in paths]
    for one, many in zip(alone, reader.patches_of(paths), strict=True):
        torch.testing.assert_close(many, one, rtol=0, atol=0)
    assert reader.patches_of([]) == []


def test_one_bad_image_of_many_is_named(reader, tmp_path):
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.fromarray(colours(64, 64)).save(good)
    bad.write_bytes(good.read_bytes()[:1200])
    with pytest.raises(ImageError, match=r"bad\.png: cannot be decoded"):
        reader.patches_of([good, bad, good])
