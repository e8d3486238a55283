import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from model.data.images import ImageError
from model.data.inputs import build_inputs
from model.data.loader import Loader, Reading
from model.data.rows import RowError
from model.data.sample import Sample
from tests.tiny import tiny_config, whole_share
from vlshard.comm.agreement import AgreedError
from vlshard.plan.plan import load_plan

CONFIG = tiny_config()
PATCH_WIDTH = CONFIG.vision.patch_width
ULYSSES = "plans/vision_cp_ulysses.py"


def sample(row, *sizes):
    """Three tokens that tell the row, then images of the given (rows, columns)."""
    ids = [10 + row, 30 + row, 50 + row]
    for height, width in sizes:
        run = [CONFIG.image_token_id] * (height * width // 4)
        ids += [CONFIG.vision_start_token_id, *run, CONFIG.vision_end_token_id]
    labels = np.where(np.arange(len(ids)) < 3, ids, -100)
    return Sample(np.array(ids), labels, tuple((1, h, w) for h, w in sizes))


class FakeRows:
    """Row i has ``samples[i]``, its images named i.0, i.1, ...; an error in place is raised."""

    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def row(self, index):
        found = self.samples[index]
        if isinstance(found, Exception):
            raise found
        return found, tuple(Path(f"{index}.{item}") for item in range(len(found.grids)))

    def where(self, index):
        return f"data.jsonl:{index + 1}"


class FakeImages:
    """Patch rows that tell the image; notes what is decoded, fails on the paths in ``bad``."""

    def __init__(self, rows, bad=()):
        self.rows, self.bad, self.decoded = rows, bad, []

    def patches_of(self, paths):
        return [self.one(str(path)) for path in paths]

    def one(self, path):
        if path in self.bad:
            raise ImageError(path, "pixels end early")
        self.decoded.append(path)
        row, item = map(int, path.split("."))
        _, height, width = self.rows.samples[row].grids[item]
        return pixels_of(row, item, height * width)


def pixels_of(row, item, count):
    generator = torch.Generator().manual_seed(100 * row + item)
    return torch.randn(count, PATCH_WIDTH, generator=generator)


def load(rows, *, plan="plans/single.py", bad=(), **reading):
    """All batches, and the fake images that served them."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    bound = load_plan(plan, world).bind(CONFIG, world)
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    images = FakeImages(rows, bad)
    settings = Reading(len(rows), **{"shuffle": False} | reading)
    batches, error = [], None
    with Loader(settings, rows, images, CONFIG, bound, group) as loader:
        try:
            for batch in loader:
                batches.append(batch)
        except Exception as caught:
            error = caught
    return batches, images, error


def until_error(rows, **reading):
    """Steps that came before the error, its class and its text."""
    reached = []
    bound = load_plan("plans/single.py", 1).bind(CONFIG, 1)
    images = FakeImages(rows, reading.pop("bad", ()))
    settings = Reading(len(rows), **{"shuffle": False} | reading)
    try:
        for batch in Loader(settings, rows, images, CONFIG, bound):
            reached.append(batch.step)
    except Exception as error:
        return reached, type(error), str(error)


def test_reading_takes_rows_in_file_order_and_wraps_round():
    reading = Reading(num_rows=5, batch=3, steps=4, shuffle=False)
    assert [reading.rows(step) for step in range(4)] == [(0, 1, 2), (3, 4, 0), (1, 2, 3), (4, 0, 1)]


def test_reading_shuffles_every_round_anew():
    reading = Reading(num_rows=50, batch=50, steps=2, seed=3)
    first, second = reading.rows(0), reading.rows(1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == Reading(num_rows=50, batch=50, steps=9, seed=3).rows(0)
    assert first != Reading(num_rows=50, batch=50, steps=2, seed=4).rows(0)


def test_reading_batch_may_be_larger_than_the_data():
    assert Reading(num_rows=2, batch=5, steps=1, shuffle=False).rows(0) == (0, 1, 0, 1, 0)


def test_loader_gives_the_batches_of_every_step():
    rows = FakeRows(sample(0, (4, 6)), sample(1), sample(2, (2, 2), (4, 4)))
    batches, _, error = load(rows, batch=2, steps=3, micro_batch=1)
    assert error is None
    ids = [[part.inputs.text.ids[0, 0].item() for part in batch.parts] for batch in batches]
    assert ids == [[10, 11], [12, 10], [11, 12]]
    assert [batch.step for batch in batches] == [1, 2, 3]
    assert [batch.tokens for batch in batches] == [14, 23, 15]
    assert [batch.images for batch in batches] == [1, 3, 2]
    assert [batch.vision_rows for batch in batches] == [(24,), (44,), (20,)]
    assert [batch.text_rows for batch in batches] == [(14,), (23,), (15,)]


def test_loader_builds_what_build_inputs_builds():
    rows = FakeRows(sample(0, (4, 6)), sample(1, (2, 2), (4, 4)))
    (batch,), _, _ = load(rows, batch=2, steps=1)
    (part,) = batch.parts
    pixels = {
        (0, 0): pixels_of(0, 0, 24),
        (1, 0): pixels_of(1, 0, 4),
        (1, 1): pixels_of(1, 1, 16),
    }
    samples = dict(enumerate(rows.samples))
    expected = build_inputs(part.header, whole_share(part.header), samples, pixels, CONFIG)
    for name in ("pixels", "coords", "corners", "corner_weights"):
        assert torch.equal(getattr(part.inputs.vision, name), getattr(expected.vision, name))
    for name in ("ids", "positions", "real", "visual", "labelled", "targets", "num_labels"):
        assert torch.equal(getattr(part.inputs.text, name), getattr(expected.text, name))


def test_loader_divides_by_the_labels_of_all_micro_batches():
    rows = FakeRows(sample(0), sample(1), sample(2))
    (batch,), _, _ = load(rows, batch=3, steps=1, micro_batch=1)
    assert [part.inputs.text.num_labels.item() for part in batch.parts] == [6.0, 6.0, 6.0]


def test_loader_raises_a_bad_row_at_its_step():
    rows = FakeRows(sample(0), sample(1), RowError("data.jsonl", 3, "no messages"), sample(3))
    reached, kind, text = until_error(rows, batch=1, steps=4)
    assert (reached, kind, text) == ([1, 2], AgreedError, "data.jsonl:3: no messages")


def test_loader_names_all_bad_rows_of_a_step():
    rows = FakeRows(OSError("disk 1"), sample(1), OSError("disk 2"))
    assert until_error(rows, batch=3, steps=1) == ([], AgreedError, "disk 1\ndisk 2")


def test_loader_refuses_placeholders_unlike_the_grid():
    short = sample(1, (4, 6))
    rows = FakeRows(sample(0), Sample(short.ids[:-2], short.labels[:-2], short.grids))
    reached, kind, text = until_error(rows, batch=1, steps=2)
    assert (reached, kind) == ([1], AgreedError)
    assert "row 1: found 5 visual placeholder tokens" in text


def test_loader_raises_damaged_pixels_at_their_step():
    rows = FakeRows(sample(0, (2, 2)), sample(1, (2, 2), (2, 2)))
    reached, kind, text = until_error(rows, batch=1, steps=2, bad=("1.1",))
    assert (reached, kind) == ([1], AgreedError)
    assert text == "data.jsonl:2: image 1.1: pixels end early"


def test_loader_passes_a_surprise_on():
    rows = FakeRows(sample(0), KeyError("a mistake"))
    assert until_error(rows, batch=1, steps=2) == ([1], KeyError, "'a mistake'")


def test_loader_stops_its_thread_when_it_is_left_early():
    rows = FakeRows(sample(0))
    bound = load_plan("plans/single.py", 1).bind(CONFIG, 1)
    reading = Reading(1, batch=1, steps=1000)
    with Loader(reading, rows, FakeImages(rows), CONFIG, bound) as loader:
        assert next(iter(loader)).step == 1
    assert "loader" not in {thread.name for thread in threading.enumerate()}


def surprise_on_last_rank():
    """What a rank says that meets an unexpected error, and what the others say."""
    last = dist.get_rank() == dist.get_world_size() - 1
    rows = FakeRows(sample(0), sample(1))
    if last:
        rows.samples = (rows.samples[0], KeyError("a mistake"))
    batches, _, error = load(rows, plan="plans/baseline_dp.py", batch=2, steps=1)
    return len(batches), type(error).__name__, str(error)


def test_a_surprise_on_one_rank_is_raised_on_all(ranks):
    assert ranks(2).run(surprise_on_last_rank, timeout=180) == [
        (0, "AgreedError", "rank 1: KeyError: 'a mistake'"),
        (0, "KeyError", "'a mistake'"),
    ]


def plan_batches(plan, sizes, batch):
    """Per rank, what is decoded and held of one step."""
    rows = FakeRows(*(sample(i, *images) for i, images in enumerate(sizes)))
    (found,), images, _ = load(rows, plan=plan, batch=batch, steps=1)
    (part,) = found.parts
    vision = part.inputs.vision
    return sorted(images.decoded), vision.pixels, found.vision_rows, part.inputs.text.ids


def error_on_last_rank(bad_row, bad_image):
    rows = FakeRows(sample(0, (2, 2)), sample(1), sample(2), sample(3, (2, 2)))
    if bad_row and dist.get_rank() == dist.get_world_size() - 1:
        rows.samples = (*rows.samples[:3], OSError("disk of the last rank"))
    last = dist.get_rank() == dist.get_world_size() - 1
    bad = ("3.0",) if bad_image and last else ()
    batches, _, error = load(rows, plan="plans/baseline_dp.py", bad=bad, batch=2, steps=2)
    return [batch.step for batch in batches], type(error).__name__, str(error)


def test_ranks_of_one_pair_decode_only_what_they_hold(ranks):
    sizes = [[(4, 4), (4, 4)], [(4, 4), (4, 4)]]
    outcomes = ranks(2).run(plan_batches, ULYSSES, sizes, 2, timeout=180)
    assert [decoded for decoded, *_ in outcomes] == [["0.0", "0.1"], ["1.0", "1.1"]]
    held = torch.cat([pixels for _, pixels, *_ in outcomes])
    whole = torch.cat([pixels_of(row, item, 16) for row in range(2) for item in range(2)])
    assert torch.equal(held, whole)
    assert [rows for *_, rows, _ in outcomes] == [(32, 32)] * 2


def test_data_ranks_read_their_own_rows(ranks):
    sizes = [[(2, 2)], [], [(4, 4)]]
    outcomes = ranks(2).run(plan_batches, "plans/baseline_dp.py", sizes, 3, timeout=180)
    assert [decoded for decoded, *_ in outcomes] == [["0.0"], ["2.0"]]
    assert [ids[:, 0].tolist() for *_, ids in outcomes] == [[10, 11], [12]]
    assert [rows for *_, rows, _ in outcomes] == [(4, 16)] * 2


@pytest.mark.parametrize(
    ("bad_row", "bad_image", "text"),
    [
        (True, False, "disk of the last rank"),
        (False, True, "data.jsonl:4: image 3.0: pixels end early"),
    ],
)
def test_a_fault_of_the_last_rank_is_raised_on_all(ranks, bad_row, bad_image, text):
    outcomes = ranks(2).run(error_on_last_rank, bad_row, bad_image, timeout=180)
    assert outcomes == [([1], "AgreedError", text)] * 2


def other_ids(plan, sizes, on):
    """What is raised if row 1 has another id on one rank, its length and grids the same."""
    rows = FakeRows(*(sample(i, *images) for i, images in enumerate(sizes)))
    if dist.get_rank() == on:
        rows.samples[1].ids[0] += 1
    batches, _, error = load(rows, plan=plan, batch=2, steps=1)
    return len(batches), type(error).__name__, str(error)


def test_other_ids_of_a_row_are_told_by_all_where_several_ranks_read_it(ranks):
    """Rank 3 reads its own row as rank 2 does; rank 0 reads row 1 for the images it is dealt."""
    sizes = [[], [(4, 4)] * 4]
    (count, kind, text), *others = ranks(4).run(other_ids, "plans/vision_dealt.py", sizes, 3)
    assert all(other == (count, kind, text) for other in others)
    assert (count, kind) == (0, "AgreedError")
    assert text.startswith("row 1 reads differently on rank 3 than on a lower rank: ")
    text = "data.jsonl:2: row 1 reads differently here than on the rank whose row it is"
    found = ranks(4).run(other_ids, "plans/vision_dealt.py", sizes, 0)
    assert found == [(0, "AgreedError", text)] * 4
