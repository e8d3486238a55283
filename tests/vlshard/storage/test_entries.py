"""Entries of a checkpoint: names and cuts, in numbers worked out by hand."""

import pytest
import torch

from vlshard.storage import Key, Parts, WrittenOut, held_entries
from vlshard.storage.entries import entry_blocks

ROW = (1 << 24) // 4  # of this width, four rows are 64 MiB


def spans(blocks):
    return [tuple((at.start, at.stop) for at in block) for block in blocks]


@pytest.mark.parametrize(
    ("shape", "fused", "expected"),
    [
        ((5, 3), None, [((0, 5), (0, 3))]),
        ((6,), WrittenOut(0, 3), [((0, 2),), ((2, 4),), ((4, 6),)]),
        ((2, 4, 3), WrittenOut(1, 2), [((0, 2), (0, 2), (0, 3)), ((0, 2), (2, 4), (0, 3))]),
        ((9, ROW), None, [((0, 4), (0, ROW)), ((4, 8), (0, ROW)), ((8, 9), (0, ROW))]),
        # Rows are counted within a factor: those of q, then those of k, never some of both.
        (
            (10, ROW),
            WrittenOut(0, 2),
            [((a, b), (0, ROW)) for a, b in ((0, 4), (4, 5), (5, 9), (9, 10))],
        ),
        # A row that is larger than a file is one entry.
        ((2, 5 * ROW), None, [((0, 1), (0, 5 * ROW)), ((1, 2), (0, 5 * ROW))]),
        ((), None, [()]),
        ((0, 3), None, []),
    ],
)
def test_entries_are_cut_by_the_model_alone(shape, fused, expected):
    assert spans(entry_blocks(shape, fused)) == expected


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ("a.weight/0", Key("a.weight")),
        ("a.weight/12.exp_avg", Key("a.weight", ".exp_avg")),
        ("a.weight/3.exp_avg_sq", Key("a.weight", ".exp_avg_sq")),
        ("a.weight", Key("a.weight")),
    ],
)
def test_an_entry_says_what_it_is_of(entry, key):
    assert Key.of(entry) == key


def test_what_is_held_are_views_or_copies():
    x = torch.arange(12.0).reshape(6, 2)
    tensors, fused = {Key("x"): x}, {"x": WrittenOut(0, 3)}
    views = held_entries(tensors, Parts(), fused)
    copies = held_entries(tensors, Parts(), fused, copies=True)
    assert [*views] == ["x/0", "x/1", "x/2"]
    x += 1
    assert [held.values[0, 0].item() for (held,) in views.values()] == [1.0, 5.0, 9.0]
    assert [held.values[0, 0].item() for (held,) in copies.values()] == [0.0, 4.0, 8.0]
