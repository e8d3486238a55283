"""What ranks tell each other of a step: read back as it was told, or refused."""

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest

from vlshard.comm.agreement import AgreedError
from vlshard.plan.facts import FactTable, SampleFacts
from vlshard.plan.header import StepHeader, make_headers
from vlshard.plan.told import HEAD, Garbled, Told, merge_told

TEXT = SampleFacts(row=7, tokens=5, labelled=3, label_runs=((0, 1), (2, 2)))
IMAGES = SampleFacts(
    row=2**40,
    tokens=40,
    labelled=2,
    grids=((1, 4, 6), (3, 4, 4)),
    starts=(2, 10, 16, 22),
    label_runs=((30, 2),),
)
BAD = SampleFacts(row=1, tokens=0, labelled=0, error="row 1: no tokens, «sorry»")
SAMPLES = [TEXT, IMAGES, BAD, replace(TEXT, row=8)]


def told(offsets, samples, fault=None):
    return Told(np.array(offsets, np.int64), FactTable.of(samples), fault)


def test_table_reads_as_the_samples():
    table = FactTable.of(SAMPLES)
    assert list(table) == SAMPLES
    assert (table[-1], len(table), list(table[1:3])) == (SAMPLES[3], 4, SAMPLES[1:3])
    assert table.frames.tolist() == [[4, 6], [4, 4], [4, 4], [4, 4]]
    assert table.frame_counts.tolist() == [0, 4, 0, 0]
    assert (table.tokens.tolist(), table.labelled.tolist()) == ([5, 40, 0, 5], [3, 2, 0, 3])
    assert FactTable.of([]).frames.shape == (0, 2)
    with pytest.raises(IndexError):
        table[4]


def test_table_takes_and_joins_samples_in_any_order():
    table = FactTable.of(SAMPLES)
    assert list(table.take(np.array([3, 2, 1]))) == [SAMPLES[3], BAD, IMAGES]
    assert FactTable.joined([table.take(np.array([0, 1])), table.take(np.array([2, 3]))]) == table
    assert table != FactTable.of([*SAMPLES[:3], replace(SAMPLES[3], labelled=2)])


def test_header_of_a_table_is_the_header_of_its_samples():
    (header,) = make_headers(SAMPLES[:2], 2)
    by_hand = StepHeader(tuple(SAMPLES[:2]), (0, 1), 5)
    for field in ("segments", "segment_home", "longest", "visual", "home", "num_labels"):
        assert getattr(header, field) == getattr(by_hand, field)
    assert header.segments == (24, 16, 16, 16) and header.segment_home == (1, 1, 1, 1)
    assert list(header.samples) == list(by_hand.samples)


@pytest.mark.parametrize(
    ("offsets", "samples", "fault"),
    [([4, 0, 2, 9], SAMPLES, None), ([], [], None), ([], [], "rank 1: KeyError: 'x'")],
)
def test_told_reads_back_as_it_was_told(offsets, samples, fault):
    found = Told.unpack(told(offsets, samples, fault).pack())
    assert (found.offsets.tolist(), list(found.facts), found.fault) == (offsets, samples, fault)


def test_merge_puts_rows_in_global_order():
    messages = [told([2, 0], [IMAGES, TEXT]), told([1], [SAMPLES[3]]), told([2], [IMAGES])]
    merged = merge_told([one.pack() for one in messages], 3)
    assert list(merged) == [TEXT, SAMPLES[3], IMAGES]


def changed(data, at, value):
    """A message with another number in it, and a right checksum."""
    words = np.frombuffer(data[: len(data) // 8 * 8], "<i8").copy()
    words[at] = value
    body = words[2:].tobytes() + data[len(data) // 8 * 8 :]
    words[1] = crc32(body)
    return words[:2].tobytes() + body


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([told([0], [TEXT], "rank 0: disk"), told([1], [BAD])], "rank 0: disk"),
        ([told([0], [TEXT]), told([1], [BAD])], "row 1: no tokens, «sorry»"),
        ([told([0], [TEXT]), told([5], [IMAGES])], "row 5 was told of a batch of 2 rows"),
        (
            [told([0], [TEXT]), told([0], [TEXT])],
            "no rank has read these rows of the batch of 2: 1",
        ),
    ],
)
def test_merge_refuses_what_cannot_be_a_batch(messages, text):
    with pytest.raises(AgreedError) as error:
        merge_told([one.pack() for one in messages], 2)
    assert str(error.value) == text


def test_merge_refuses_ranks_that_disagree():
    messages = [told([0], [TEXT]), told([0], [replace(TEXT, tokens=6)])]
    with pytest.raises(AgreedError, match="row 7 reads differently on rank 1 than on a lower rank"):
        merge_told([one.pack() for one in messages], 1)


def test_merge_names_the_rank_whose_message_is_garbled():
    with pytest.raises(AgreedError) as error:
        merge_told([told([0], [TEXT]).pack(), b"x" * 100], 1)
    assert str(error.value) == (
        "what rank 1 tells of its rows cannot be read: it is cut off, garbled or of another version"
    )


def test_no_cut_or_flipped_message_is_read():
    data = told([4, 0, 2, 9], SAMPLES).pack()
    for size in range(len(data)):
        with pytest.raises(Garbled):
            Told.unpack(data[:size])
    for at in range(len(data)):
        with pytest.raises(Garbled):
            Told.unpack(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])


def test_hostile_numbers_are_refused_or_stay_small():
    """Every number of a message, in turn, another one behind a right checksum."""
    data = told([4, 0, 2, 9], SAMPLES).pack()
    refused = 0
    for at in range(2, len(data) // 8):
        for value in (-1, 0, 3, 2**31 - 1, 2**31, 2**62, -(2**63)):
            try:
                found = Told.unpack(changed(data, at, value))
            except Garbled:
                refused += 1
                continue
            assert len(found.facts) <= 4 and len(found.facts.frames) <= 4
            assert found.facts.frames.prod(axis=1).max(initial=0) < 2**31
            assert len(list(found.facts)) == len(found.facts)
    assert refused > 4 * (len(data) // 8 - HEAD)
