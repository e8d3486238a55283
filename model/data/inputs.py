"""The tensors that one rank computes a micro-batch from, built on the host from ids and grids."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from model.config import Config, VisionConfig
from model.data.positions import coords_of_patches, corners_of_patches, positions_of_runs
from model.data.sample import IGNORED, Sample
from vlshard import BoundPlan, Share, StepHeader
from vlshard.language import IntArray
from vlshard.plan import NOTHING, StepBoundaries, TokenIds
from vlshard.pytree import pytree

Pixels = Mapping[tuple[int, int], Tensor]
Device = torch.device | str


@pytree
class VisionInputs:
    """Patches of this rank, in the order of its share; n patches of p values each.

    ``coords`` are of the patches that attention computes on, where a split gathers them; else of
    these.

    ``corners`` and ``corner_weights`` say how the learned position table is interpolated at each
    patch: its four nearest table rows and their bilinear weights.
    """

    pixels: Float[Tensor, "n p"]
    coords: Int[Tensor, "entered 2"]
    corners: Int[Tensor, "n 4"]
    corner_weights: Float[Tensor, "n 4"]


@pytree
class TextInputs:
    """Tokens of this rank: b rows of s positions, padded behind the last token, or one packed row.

    ``positions`` are of the tokens that attention computes on, where a split gathers them; else
    of these. ``real``, ``visual`` and ``labelled`` are indices into the flat b*s rows,
    increasing: tokens that are no padding, visual placeholders, and tokens with a target.
    ``targets`` are the ids that the labelled tokens should predict; where ranks share the
    vocabulary, ``plan_step`` makes them those of the labelled tokens of all of them.
    ``num_labels`` is what a token's loss is divided by, as a 0-dim float: the number of labelled
    tokens of the whole global batch, at least 1, times the number of ranks that compute the same
    token.
    """

    ids: Int[Tensor, "b s"]
    positions: Int[Tensor, "3 rows entered"]
    real: Int[Tensor, " t"]
    visual: Int[Tensor, " v"]
    labelled: Int[Tensor, " y"]
    targets: Int[Tensor, " z"]
    num_labels: Float[Tensor, ""]


@pytree
class ModelInputs:
    """One rank's part of a micro-batch; ``vision`` is None where no rank has a visual row."""

    vision: VisionInputs | None
    text: TextInputs


class Item(NamedTuple):
    """One image or video of a micro-batch.

    Attributes:
      key: (sample index, index among the sample's items).
      start: its first row in the patch pack.
      frames: number of frames.
      size: (rows, columns) of each frame [patches].
    """

    key: tuple[int, int]
    start: int
    frames: int
    size: tuple[int, int]

    @property
    def patches(self) -> int:
        """Rows in the patch pack."""
        return self.frames * self.size[0] * self.size[1]


def items_of(header: StepHeader) -> tuple[Item, ...]:
    """Images and videos of a micro-batch, in the order in which their patches are packed."""
    table = header.table
    patches = table.grids.prod(axis=1)
    counts = table.grid_counts
    samples = np.repeat(np.arange(len(table)), counts)
    numbers = np.arange(len(samples)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = np.stack([samples, numbers, np.cumsum(patches) - patches, *table.grids.T])
    return tuple(Item((i, k), at, t, (h, w)) for i, k, at, t, h, w in columns.T.tolist())


def images_touched(header: StepHeader, patches: IntArray) -> tuple[tuple[int, int], ...]:
    """Images and videos of which a rank holds rows; only these need to be decoded there.

    Args:
      header: the micro-batch.
      patches: rows of the patch pack that the rank holds.
    Returns: (sample index, item index) pairs, increasing.
    """
    items = items_of(header)
    return tuple(items[i].key for i in np.unique(_item_of(items, patches)))


def build_inputs(
    header: StepHeader,
    share: Share,
    samples: Mapping[int, Sample],
    pixels: Pixels,
    config: Config,
    device: Device = "cpu",
) -> ModelInputs:
    """The tensors of one rank for one micro-batch.

    Args:
      header: the micro-batch.
      share: what this rank holds of it.
      samples: by index in the header; at least those whose rows this rank holds.
      pixels: patch rows of images and videos by (sample index, item index), each of t * h * w rows
        in order; at least those that ``images_touched`` names.
      config: of the model.
      device: where the tensors are to be.
    Returns: token and patch rows in the order of the share. Padding has id 0 and position 0.
    Raises: ValueError if pixels are missing or have another shape than their grid.
    """
    vision = _vision_inputs(header, share, pixels, config.vision) if share.visual else None
    text = _text_inputs(header, share, samples, config)
    return ModelInputs(
        vision=None if vision is None else VisionInputs(*(x.to(device) for x in vision)),
        text=TextInputs(*(x.to(device) for x in text)),
    )


def plan_step(
    bound: BoundPlan, header: StepHeader, inputs: ModelInputs
) -> tuple[StepBoundaries, ModelInputs]:
    """What a rank calls in one micro-batch, and its tensors as that has them.

    Ranks that share the vocabulary exchange ids on the host, so all ranks call this alike.

    Args:
      bound: the plan.
      header: the micro-batch.
      inputs: this rank's, on the host.
    """
    at = bound.step(header, bound.exchange(token_ids(inputs.text)))
    if at.targets is None:
        return at, inputs
    text = replace(inputs.text, targets=torch.from_numpy(at.targets))
    return at, replace(inputs, text=text)


def token_ids(text: TextInputs) -> TokenIds:
    """What tokens ask the vocabulary for: padding and placeholders need no row of it."""
    real, visual = (x.cpu().numpy() for x in (text.real, text.visual))
    ids, given = np.full(text.ids.numel(), NOTHING), text.ids.flatten().cpu().numpy()
    ids[real] = given[real]
    ids[visual] = NOTHING
    return TokenIds(ids, text.targets.cpu().numpy())


def _item_of(items: tuple[Item, ...], patches: IntArray) -> IntArray:
    """Number of the item to which each patch belongs."""
    ends = np.array([item.start + item.patches for item in items], dtype=np.int64)
    return np.searchsorted(ends, patches, side="right")


def _vision_inputs(
    header: StepHeader, share: Share, pixels: Pixels, vision: VisionConfig
) -> tuple[Tensor, ...]:
    """The fields of VisionInputs."""
    items = items_of(header)
    item, within, sizes = _places_in_items(items, share.patches)
    coords = _coords(within, sizes, vision)
    corners, weights = corners_of_patches(coords, sizes, side=vision.position_side)
    rows = _pick_pixels(items, item, within, pixels, vision.patch_width)
    if share.entered_patches is not None:
        _, within, sizes = _places_in_items(items, share.entered_patches)
        coords = _coords(within, sizes, vision)
    return (rows, *(torch.from_numpy(array) for array in (coords, corners, weights)))


def _places_in_items(
    items: tuple[Item, ...], patches: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """For each patch its item, its row in that, and the (rows, columns) of a frame of it."""
    item = _item_of(items, patches)
    starts = np.array([item.start for item in items], dtype=np.int64)
    sizes = np.array([item.size for item in items], dtype=np.int64).reshape(-1, 2)
    return item, patches - starts[item], sizes[item]


def _coords(within: IntArray, sizes: IntArray, vision: VisionConfig) -> IntArray:
    """(row, column) of each patch in its frame."""
    frame_rows = within % sizes.prod(axis=-1)
    return coords_of_patches(frame_rows, sizes[:, 1], merge=vision.spatial_merge_size)


def _pick_pixels(
    items: tuple[Item, ...], item: IntArray, within: IntArray, pixels: Pixels, width: int
) -> Float[Tensor, "n p"]:
    """Patch rows of each item, put where the share has them."""
    dtype = next((rows.dtype for rows in pixels.values()), torch.float32)
    rows = torch.empty(len(item), width, dtype=dtype)
    order = np.argsort(item, kind="stable")
    numbers, counts = np.unique(item, return_counts=True)
    for number, stop, count in zip(numbers, np.cumsum(counts), counts, strict=True):
        places = order[stop - count : stop]
        whole = _pixels_of(items[number], pixels, width)
        rows[torch.from_numpy(places)] = whole[torch.from_numpy(within[places])]
    return rows


def _pixels_of(item: Item, pixels: Pixels, width: int) -> Tensor:
    """Patch rows of one item, checked against its grid."""
    sample, number = item.key
    grid = (item.frames, *item.size)
    name = f"item {number} of sample {sample} with grid {grid}"
    if item.key not in pixels:
        raise ValueError(f"{name} has no pixels")
    if tuple(pixels[item.key].shape) != (item.patches, width):
        shape = list(pixels[item.key].shape)
        raise ValueError(f"{name} has pixels {shape}, expected {[item.patches, width]}")
    return pixels[item.key]


def _text_inputs(
    header: StepHeader, share: Share, samples: Mapping[int, Sample], config: Config
) -> tuple[Tensor, ...]:
    """The fields of TextInputs."""
    tokens = header.table.tokens
    real = share.positions < tokens[share.samples]
    held = np.unique(share.samples[real])
    at = _places(tokens, held, share.samples[real], share.positions[real])
    ids, targets = np.zeros(real.shape, dtype=np.int64), np.full(real.shape, IGNORED)
    if held.size:
        chosen = [samples[i] for i in held.tolist()]
        ids[real] = np.concatenate([sample.ids for sample in chosen])[at]
        targets[real] = np.concatenate([_targets(sample) for sample in chosen])[at]
    visual = real & ((ids == config.image_token_id) | (ids == config.video_token_id))
    labelled = targets != IGNORED
    entered = share.entered_tokens or (share.samples, share.positions)
    positions = _rope_positions(header, *entered, config)
    arrays = (ids, positions, *map(np.flatnonzero, (real, visual, labelled)), targets[labelled])
    num_labels = float(max(header.num_labels, 1) * share.copies)
    return (*(torch.from_numpy(array) for array in arrays), torch.tensor(num_labels))


def _rope_positions(
    header: StepHeader, samples: IntArray, positions: IntArray, config: Config
) -> IntArray:
    """Multimodal positions of tokens, [3, b, s]; 0 where there is padding."""
    tokens = header.table.tokens
    real = positions < tokens[samples]
    held = np.unique(samples[real])
    found = np.zeros((3, *real.shape), dtype=np.int64)
    if held.size:
        at = _places(tokens, held, samples[real], positions[real])
        found[:, real] = np.concatenate(_positions(header, held, config), axis=1)[:, at]
    return found


def _places(tokens: IntArray, held: IntArray, samples: IntArray, positions: IntArray) -> IntArray:
    """Where tokens lie among all tokens of the held samples, one sample after another."""
    starts = np.zeros_like(tokens)
    starts[held] = np.cumsum(tokens[held]) - tokens[held]
    return starts[samples] + positions


def _targets(sample: Sample) -> IntArray:
    """What each token should predict: the label of the next, nothing behind the last."""
    return np.append(sample.labels[1:], IGNORED)


def _positions(header: StepHeader, held: IntArray, config: Config) -> list[IntArray]:
    """Positions of all tokens of some samples, each from its own start."""
    merge = config.vision.spatial_merge_size
    facts = [header.samples[i] for i in held.tolist()]
    return [positions_of_runs(f.tokens, f.starts, f.frames, merge=merge) for f in facts]
