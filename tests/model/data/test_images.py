import json
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from transformers import AutoImageProcessor
from transformers.image_utils import load_image

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
    """Grid and patches as transformers makes them of a file."""
    batch = AutoImageProcessor.from_pretrained(folder)(
        images=[load_image(str(path))], return_tensors="pt"
    )
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


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK", "YCbCr"])
def test_every_mode_becomes_rgb(reader, tmp_path, mode):
    name = "a.tiff" if mode in ("CMYK", "YCbCr") else "a.png"
    image = Image.fromarray(colours(40, 72, 4), "RGBA")
    if mode == "I;16":
        image = Image.fromarray(np.arange(40 * 72, dtype=np.uint16).reshape(40, 72))
    elif mode != "RGBA":
        image = image.convert("RGB").convert(mode)
    image.save(tmp_path / name)
    assert_as_transformers(reader, tmp_path / name)


def test_palette_with_transparency_gives_its_colours_and_no_warning(reader, tmp_path):
    image = Image.fromarray(colours(32, 64)).convert("P", palette=Image.Palette.ADAPTIVE)
    image.save(tmp_path / "a.png", transparency=bytes(range(0, 250, 10)))
    with pytest.warns(UserWarning, match="Transparency expressed in bytes"):
        grid, patches = reference(reader.folder, tmp_path / "a.png")
    assert reader.grid(tmp_path / "a.png") == grid
    torch.testing.assert_close(reader.patches(tmp_path / "a.png"), patches, rtol=0, atol=0)


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
        (lambda path: path.mkdir(), "cannot be decoded: [Errno 21] Is a directory: '{path}'"),
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
