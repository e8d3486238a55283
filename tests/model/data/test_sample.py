"""Samples, their placeholder runs, and what is said of bad ones."""

import numpy as np
import pytest

from model.data.sample import Sample, SampleError, placeholder_runs, sample_facts
from tests.tables import CONFIG, ROWS, T1, T3, T4, T5_SECOND

IGNORED = -100


def text(*ids, labels=None):
    """A sample without images; every token labelled unless told otherwise."""
    return Sample(np.array(ids, dtype=np.int64), np.array(labels or ids, dtype=np.int64))


def cut(row, part):
    """A sample of which only a part of the tokens is left, with all of its images."""
    whole = row.sample(CONFIG)
    return Sample(whole.ids[part], whole.labels[part], whole.grids)


@pytest.mark.parametrize(
    ("row", "starts"),
    [(T1, (4,)), (T3, (4, 12, 20)), (T4, (2, 9, 14)), (T5_SECOND, (3, 8))],
)
def test_facts_give_one_start_a_frame(row, starts):
    facts = sample_facts(row.sample(CONFIG), 7, CONFIG)
    assert (facts.row, facts.tokens, facts.error) == (7, len(row.ids(CONFIG)), None)
    assert facts.starts == starts
    assert facts.grids == row.grids
    assert len(facts.frames) == len(starts)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_no_reference_row_has_a_fault(row):
    assert sample_facts(row.sample(CONFIG), 0, CONFIG).error is None


def test_runs_name_what_is_video():
    runs = placeholder_runs(T4.ids(CONFIG), CONFIG)
    assert runs.starts.tolist() == [2, 9, 14]
    assert runs.lengths.tolist() == [4, 2, 2]
    assert runs.video.tolist() == [False, True, True]


def test_runs_of_two_kinds_may_touch_and_lie_at_the_edges():
    runs = placeholder_runs(np.array([100, 100, 101, 5, 100]), CONFIG)
    assert runs.starts.tolist() == [0, 2, 4]
    assert runs.lengths.tolist() == [2, 1, 1]
    assert placeholder_runs(np.array([1, 2]), CONFIG).starts.tolist() == []


def test_first_label_does_not_count():
    assert sample_facts(text(1, 2, 3), 0, CONFIG).labelled == 2
    assert sample_facts(text(1, 2, 3, labels=[1, IGNORED, 3]), 0, CONFIG).labelled == 1
    assert sample_facts(text(9), 0, CONFIG).labelled == 0


@pytest.mark.parametrize(
    ("labels", "runs"),
    [
        ([1, 2, 3], ((0, 2),)),
        ([1, IGNORED, 3, 4, IGNORED, 6], ((1, 2), (4, 1))),
        ([5, IGNORED, IGNORED], ()),
        ([5], ()),
    ],
)
def test_label_runs_are_where_the_next_label_counts(labels, runs):
    facts = sample_facts(text(*range(1, len(labels) + 1), labels=labels), 0, CONFIG)
    assert facts.label_runs == runs
    assert facts.labelled == sum(count for _, count in runs)


def test_seven_tokens_have_six_terms():
    assert sample_facts(text(1, 2, 3, 4, 5, 6, 7), 0, CONFIG).labelled == 6


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_comes_off(side):
    whole, pads = T1.sample(CONFIG), np.zeros(3, dtype=np.int64)
    place = (whole.ids, pads) if side == "right" else (pads, whole.ids)
    labels = (whole.labels, pads) if side == "right" else (pads, whole.labels)
    mask = np.concatenate(place) != 0
    sample = Sample.from_padded(np.concatenate(place), mask, np.concatenate(labels), whole.grids)
    assert np.array_equal(sample.ids, whole.ids)
    assert np.array_equal(sample.labels, whole.labels)
    assert sample.grids == whole.grids


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (
            slice(0, 9),
            "row 3: found 5 visual placeholder tokens in 1 runs, expected 6 in 1: item 0 with grid "
            "(1, 4, 6) has a run of 5 where 6 belong",
        ),
        (
            slice(-3, None),
            "row 3: found 0 visual placeholder tokens in 0 runs, expected 6 in 1: nothing is left "
            "for item 0 with grid (1, 4, 6)",
        ),
    ],
)
def test_truncated_placeholders_are_named(part, error):
    facts = sample_facts(cut(T1, part), 3, CONFIG)
    assert facts.error == error
    assert (facts.grids, facts.starts) == ((), ())


def test_truncated_video_is_named():
    facts = sample_facts(cut(T3, slice(0, 18)), 1, CONFIG)
    assert facts.error == (
        "row 1: found 8 visual placeholder tokens in 2 runs, expected 12 in 3: nothing is left for "
        "item 0 with grid (3, 4, 4)"
    )


def test_placeholders_without_a_grid_are_named():
    whole = T4.sample(CONFIG)
    facts = sample_facts(Sample(whole.ids, whole.labels, whole.grids[:1]), 2, CONFIG)
    assert facts.error == (
        "row 2: found 8 visual placeholder tokens in 3 runs, expected 4 in 1: the run at token 9 "
        "has no grid (grids: [(1, 4, 4)])"
    )


def test_frames_need_video_placeholders():
    ids = np.array([1, 102, 100, 103, 102, 100, 103, 2])
    facts = sample_facts(Sample(ids, ids, ((2, 2, 2),)), 0, CONFIG)
    assert facts.error == (
        "row 0: item 0 with grid (2, 2, 2) has image placeholders, only a video has frames"
    )


@pytest.mark.parametrize("grid", [(1, 3, 4), (1, 4, 5), (0, 4, 4), (1, 0, 0)])
def test_grids_are_made_of_merge_units(grid):
    sample = Sample(T1.ids(CONFIG), T1.ids(CONFIG), (grid,))
    error = f"row 0: grid {grid} of item 0 is not made of 2x2 merge units"
    assert sample_facts(sample, 0, CONFIG).error == error


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        (text(1, 104), "id 104 of token 1 is outside of the vocabulary of 104"),
        (text(1, -1), "id -1 of token 1 is outside of the vocabulary of 104"),
        (text(1, 2, labels=[1, 200]), "label 200 of token 1 is outside of the vocabulary of 104"),
        (text(1, 2, labels=[1, -1]), "label -1 of token 1 is outside of the vocabulary of 104"),
        (text(), "it has no tokens"),
    ],
)
def test_bad_tokens_are_named(sample, error):
    assert sample_facts(sample, 5, CONFIG).error == f"row 5: {error}"


def test_ids_and_labels_have_one_length():
    with pytest.raises(SampleError, match=r"found \[3\] and \[2\]"):
        Sample(np.arange(3), np.arange(2), ())
