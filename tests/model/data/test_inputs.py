"""Cutting a micro-batch by any share: reference cuts, uneven lengths, shifted labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.data.inputs import build_inputs, images_touched, items_of
from model.data.sample import Sample, sample_facts
from tests.positions import mrope_positions, patch_coords, position_corners
from tests.tables import CONFIG, PACKED_FIRST, PACKED_SECOND, T1, T2, T3, T4
from tests.tiny import whole_share
from vlshard import MeshShape, Packing, layout
from vlshard.plan.header import Share, make_headers
from vlshard.plan.tokens import token_places

EMPTY = np.zeros(0, dtype=np.int64)


def header_of(*samples):
    return make_headers([sample_facts(s, i, CONFIG) for i, s in enumerate(samples)], 1)[0]


def pixels_of(*samples):
    """Patch rows in which every value of the batch is another one."""
    header, width = header_of(*samples), CONFIG.vision.patch_width
    rows = torch.arange(sum(header.segments) * width, dtype=torch.float32).reshape(-1, width)
    parts = rows.split([item.patches for item in items_of(header)])
    return {item.key: part for item, part in zip(items_of(header), parts, strict=True)}


def share_of(header, positions, patches=EMPTY, rows=None):
    rows = np.arange(len(header.samples)) if rows is None else np.array(rows, dtype=np.int64)
    samples, places = np.meshgrid(rows, np.array(positions), indexing="ij")
    return Share(np.array(patches), samples, places, header.visual)


def text_of(samples, positions, rows=None):
    header = header_of(*samples)
    share = share_of(header, positions, rows=rows)
    return build_inputs(header, share, dict(enumerate(samples)), {}, CONFIG).text


def zigzag(length, rank, ranks):
    """Positions of a rank: its chunk from the head and its chunk from the tail."""
    chunks = np.split(np.arange(length), 2 * ranks)
    return np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]])


def contiguous(length, rank, ranks):
    return np.split(np.arange(length), ranks)[rank]


CUTS = [
    (contiguous, 2, 0, range(8), [0, 1, 2, 3]),
    (contiguous, 2, 1, range(8, 16), [4, 5]),
    (zigzag, 2, 0, [0, 1, 2, 3, 12, 13, 14, 15], []),
    (zigzag, 2, 1, range(4, 12), [0, 1, 2, 3, 4, 5]),
    (contiguous, 4, 0, range(4), []),
    (contiguous, 4, 1, range(4, 8), [0, 1, 2, 3]),
    (contiguous, 4, 2, range(8, 12), [4, 5]),
    (contiguous, 4, 3, range(12, 16), []),
    (zigzag, 4, 0, [0, 1, 14, 15], []),
    (zigzag, 4, 1, [2, 3, 12, 13], []),
    (zigzag, 4, 2, [4, 5, 10, 11], [0, 1]),
    (zigzag, 4, 3, range(6, 10), [2, 3, 4, 5]),
]


@pytest.mark.parametrize(("cut", "ranks", "rank", "index", "visual_rows"), CUTS)
def test_reference_cuts(cut, ranks, rank, index, visual_rows):
    sample, positions = T1.sample(CONFIG), cut(16, rank, ranks)
    assert positions.tolist() == list(index)
    text = text_of([sample], positions)
    padded = np.pad(T1.positions, ((0, 0), (0, 3)))
    assert np.array_equal(text.positions[:, 0].numpy(), padded[:, positions])
    assert np.array_equal(text.ids[0].numpy(), np.pad(sample.ids, (0, 3))[positions])
    assert text.real.tolist() == np.flatnonzero(positions < 13).tolist()
    placeholders = np.flatnonzero(sample.ids == CONFIG.image_token_id)
    assert positions[text.visual.numpy()].tolist() == placeholders[visual_rows].tolist()


def test_zigzag_positions_of_the_second_of_two():
    text = text_of([T1.sample(CONFIG)], zigzag(16, 1, 2))
    assert text.positions[:, 0].tolist() == [
        [4, 4, 4, 4, 4, 4, 7, 8],
        [4, 4, 4, 5, 5, 5, 7, 8],
        [4, 5, 6, 4, 5, 6, 7, 8],
    ]


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("cut", [contiguous, zigzag])
def test_positions_are_cut_along_tokens_only(rows, cut):
    text = text_of([T1.sample(CONFIG)] * rows, cut(16, 1, 2))
    assert text.positions.shape == (3, rows, 8)
    one = text_of([T1.sample(CONFIG)], cut(16, 1, 2)).positions
    assert torch.equal(text.positions, one.expand(3, rows, 8))


@pytest.mark.parametrize("length", [1, 2, 7, 13, 17])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cut", [contiguous, zigzag])
def test_no_token_and_no_label_is_lost(length, ranks, cut):
    ids = np.arange(1, length + 1)
    padded = -(-length // (2 * ranks)) * 2 * ranks
    terms, tokens = [], []
    for rank in range(ranks):
        positions = cut(padded, rank, ranks)
        text = text_of([Sample(ids, ids)], positions)
        assert text.num_labels == max(length - 1, 1)
        tokens += text.ids.flatten()[text.real].tolist()
        at = positions[text.labelled.numpy()].tolist()
        terms += list(zip(at, text.targets.tolist(), strict=True))
    assert sorted(tokens) == ids.tolist()
    assert sorted(terms) == [(i, i + 2) for i in range(length - 1)]


def test_zigzag_of_eight_tokens():
    ids = np.arange(1, 9)
    rows = [text_of([Sample(ids, ids)], zigzag(8, rank, 2)).ids[0].tolist() for rank in (0, 1)]
    assert rows == [[1, 2, 7, 8], [3, 4, 5, 6]]


def test_labels_are_shifted_before_the_cut():
    sample = T1.sample(CONFIG, labelled=[11, 12])
    first, second = (text_of([sample], zigzag(16, rank, 2)) for rank in (0, 1))
    assert (first.labelled.tolist(), first.targets.tolist()) == ([], [])
    assert zigzag(16, 1, 2)[second.labelled.numpy()].tolist() == [10, 11]
    assert second.targets.tolist() == [4, 5]
    assert first.num_labels == second.num_labels == 2


def test_a_target_may_come_from_another_rank():
    ids = np.arange(1, 9)
    text = text_of([Sample(ids, ids)], contiguous(8, 0, 2))
    assert text.targets.tolist() == [2, 3, 4, 5]


def test_rows_of_different_length_are_padded_behind():
    long, short = T2.sample(CONFIG), Sample(np.array([7, 8, 9]), np.array([7, -100, 9]))
    text = text_of([long, short], np.arange(14))
    assert text.ids[1].tolist() == [7, 8, 9, *[0] * 11]
    assert text.positions[:, 1].tolist() == [[0, 1, 2, *[0] * 11]] * 3
    assert text.real.tolist() == [*range(13), 14, 15, 16]
    assert text.visual.tolist() == [2, 3, 4, 5, 8, 9, 10]
    assert text.labelled.tolist()[-1] == 15
    assert text.targets.tolist()[-1] == 9


def test_a_rank_takes_only_its_rows():
    samples = [T1.sample(CONFIG), T2.sample(CONFIG), T3.sample(CONFIG)]
    header = header_of(*samples)
    share = share_of(header, np.arange(26), rows=[2])
    text = build_inputs(header, share, {2: samples[2]}, {}, CONFIG).text
    assert text.ids.tolist() == [samples[2].ids.tolist()]
    assert np.array_equal(text.positions[:, 0].numpy(), T3.positions)
    assert text.num_labels == header.num_labels


def test_a_rank_without_rows_has_empty_tensors():
    sample = T1.sample(CONFIG)
    header = header_of(sample)
    inputs = build_inputs(header, share_of(header, np.arange(4), rows=[]), {}, {}, CONFIG)
    assert inputs.text.ids.shape == (0, 4)
    assert inputs.text.positions.shape == (3, 0, 4)
    assert inputs.vision.pixels.shape == (0, CONFIG.vision.patch_width)
    assert [x.shape[0] for x in (inputs.vision.coords, inputs.vision.corners)] == [0, 0]


def test_no_visual_row_anywhere_skips_the_tower():
    sample = Sample(np.arange(1, 5), np.arange(1, 5))
    header = header_of(sample)
    inputs = build_inputs(header, whole_share(header), {0: sample}, {}, CONFIG)
    assert inputs.vision is None
    assert inputs.text.visual.tolist() == []


# Eight and nine tokens in one pack: which of them a rank holds, worked out by hand. Zigzag cuts
# them into chunks of 2 2 2 2 and 3 2 2 2.
PACKS = {
    ("(smp s) m", 1): [(range(8), range(9))],
    ("(smp s@cp) m", 2): [(range(4), range(5)), (range(4, 8), range(5, 9))],
    ("(smp s@cp.zigzag) m", 2): [([0, 1, 6, 7], [0, 1, 2, 7, 8]), (range(2, 6), range(3, 7))],
    ("(smp s)@cp m", 2): [(range(8), range(1)), ([], range(1, 9))],
}


@pytest.mark.parametrize(("spec", "ranks"), PACKS)
def test_each_sample_of_a_pack_starts_again(spec, ranks):
    table = (PACKED_FIRST, PACKED_SECOND)
    samples = [row.sample(CONFIG, range(len(row.ids(CONFIG)))) for row in table]
    header = header_of(*samples)
    where = layout(spec, MeshShape(cp=ranks), smp=Packing([8, 9]), m=1)
    for rank, held in enumerate(PACKS[spec, ranks]):
        share = Share(EMPTY, *token_places(where, rank), visual=True, copies=2)
        text = build_inputs(header, share, dict(enumerate(samples)), {}, CONFIG).text
        cuts = [(row, list(places)) for row, places in zip(table, held, strict=True)]
        ids = [row.ids(CONFIG)[places] for row, places in cuts]
        positions = [row.positions[:, places] for row, places in cuts]
        assert text.ids.tolist() == [np.concatenate(ids).tolist()]
        assert np.array_equal(text.positions[:, 0].numpy(), np.concatenate(positions, axis=1))
        assert text.real.tolist() == list(range(text.ids.numel()))
        # What follows inside the same sample; nothing does behind the last of its tokens.
        nexts = [row.ids(CONFIG)[p + 1 : p + 2].tolist() for row, places in cuts for p in places]
        assert text.labelled.tolist() == [i for i, following in enumerate(nexts) if following]
        assert text.targets.tolist() == [token for following in nexts for token in following]
        assert text.num_labels == 2 * (7 + 8)


def test_no_label_divides_by_one_and_copies_count():
    sample = T1.sample(CONFIG, labelled=[])
    header = header_of(sample)
    share = replace(share_of(header, range(13)), copies=4)
    inputs = build_inputs(header, share, {0: sample}, {}, CONFIG)
    assert inputs.text.num_labels == 4
    assert inputs.text.labelled.tolist() == []


def test_whole_pack_of_patches():
    samples = [T2.sample(CONFIG), T4.sample(CONFIG), T3.sample(CONFIG)]
    header, pixels = header_of(*samples), pixels_of(*samples)
    inputs = build_inputs(header, whole_share(header), dict(enumerate(samples)), pixels, CONFIG)
    frames = [frame for sample in header.samples for frame in sample.frames]
    side = CONFIG.vision.position_side
    corners = [position_corners(h, w, side, 2) for h, w in frames]
    vision = inputs.vision
    assert torch.equal(vision.pixels, torch.cat(list(pixels.values())))
    assert np.array_equal(vision.coords, np.concatenate([patch_coords(*f, 2) for f in frames]))
    assert np.array_equal(vision.corners, np.concatenate([c for c, _ in corners]))
    assert np.array_equal(vision.corner_weights, np.concatenate([w for _, w in corners]))
    assert images_touched(header, np.arange(0)) == ()
    assert images_touched(header, whole_share(header).patches) == tuple(pixels)


def test_any_rows_in_any_order_are_those_of_the_whole_pack():
    samples = [T2.sample(CONFIG), T4.sample(CONFIG), T3.sample(CONFIG)]
    header, pixels = header_of(*samples), pixels_of(*samples)
    chosen = dict(enumerate(samples))
    whole = build_inputs(header, whole_share(header), chosen, pixels, CONFIG).vision
    patches = np.random.default_rng(0).permutation(sum(header.segments))[:50]
    share = share_of(header, np.arange(26), patches)
    part = build_inputs(header, share, chosen, pixels, CONFIG).vision
    for name in ("pixels", "coords", "corners", "corner_weights"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[torch.from_numpy(patches)])


def test_only_items_that_are_touched_are_needed():
    samples = [T2.sample(CONFIG), T4.sample(CONFIG)]
    header, pixels = header_of(*samples), pixels_of(*samples)
    assert header.segments == (16, 12, 16, 8, 8)
    patches = np.arange(20, 48)
    assert images_touched(header, patches) == ((0, 1), (1, 0), (1, 1))
    some = {key: pixels[key] for key in images_touched(header, patches)}
    share = share_of(header, np.arange(0), patches)
    vision = build_inputs(header, share, dict(enumerate(samples)), some, CONFIG).vision
    assert torch.equal(vision.pixels, torch.cat(list(pixels.values()))[20:48])


def test_pixels_unlike_their_grid_are_refused():
    sample = T1.sample(CONFIG)
    header, width = header_of(sample), CONFIG.vision.patch_width
    share = whole_share(header)
    with pytest.raises(ValueError, match=r"item 0 of sample 0 with grid \(1, 4, 6\) has no pixels"):
        build_inputs(header, share, {0: sample}, {}, CONFIG)
    with pytest.raises(ValueError, match=rf"pixels \[20, {width}\], expected \[24, {width}\]"):
        build_inputs(header, share, {0: sample}, {(0, 0): torch.zeros(20, width)}, CONFIG)


def test_positions_of_a_cut_are_a_cut_of_positions():
    samples = [T4.sample(CONFIG), T3.sample(CONFIG)]
    cut = zigzag(28, 1, 2)
    text = text_of(samples, cut)
    for i, sample in enumerate(samples):
        here = cut[cut < len(sample.ids)]
        expected = mrope_positions(sample.ids, sample.grids, CONFIG)[:, here]
        assert np.array_equal(text.positions[:, i, : len(here)].numpy(), expected)
