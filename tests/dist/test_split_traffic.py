"""What a step under splits sends and keeps: as many bytes as the programs say, and nothing else."""

from math import prod
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from model.config.config import Config
from tests.batches import batches
from tests.benchmarks.live_bytes import LiveBytes
from tests.dist.events import collectives, messages
from tests.dist.test_splits import KV_PART, TP, VISION, raw, write_plan_of
from tests.training import Run
from vlshard.plan import doors
from vlshard.storage import clip_gradients, local_part

BATCH, TEXT = "mixed sizes", "lengths 1 2 7 13 17"
TURNS = ("text only", BATCH, TEXT)
HOME = "(img@dp.home s) c"
# Blocks of the model: how often each inside comes.
WIDTHS = {"text": 64, "vision": 32}
BLOCKS = {"text.attention": 4, "text.mlp": 2, "vision.attention": 3, "vision.mlp": 3}

# Per number of ranks: mesh, splits, patches, tokens, modes.
PLANS = {
    (2, "whole"): ("dp=1, tp=2", TP | VISION, HOME, "b@dp.home s m", "{}"),
    (2, "cut"): ("dp=1, tp=2", TP | VISION, "(img@dp.home s)@tp c", "b@dp.home s@tp m", "{}"),
    (2, "packed, cut"): ("dp=1, tp=2", TP, HOME, "(smp@dp.home s)@tp m", "{}"),
    (4, "dp2, cut"): ("dp=2, tp=2", TP | VISION, HOME, "b@dp.home s@tp m", "{}"),
    (4, "whole"): ("dp=1, tp=(2, 2)", KV_PART, HOME, "b@dp.home s m", "{}"),
    (4, "cp2, cut"): ("dp=1, cp=2, tp=2", TP, "(img@dp.home s) c", "b@dp.home s@cp.zigzag@tp m",
        '{"text": gather("cp")}'),
}
TO_STORE = {
    ("batch_isend_irecv", "vlshard.storage.fsdp_collectives"),
    ("all_reduce", "vlshard.storage.norm"),  # clipping needs the norm
    ("all_reduce", "tests.training"),  # the loss, to be told
    ("all_gather", "tests.training"),  # rows of each rank, to be told
    ("all_reduce", "torch.distributed.fsdp._fully_shard._fsdp_collectives"),  # copies
}
SUM = ("all_reduce", "vlshard.comm.transport")


def door_elements(run, header, rank) -> tuple[int, int]:
    """Elements that a rank sends at doors in all blocks, by their programs; again on the way in."""
    bound, total, again = run.bound, 0, 0
    where = bound.layouts(header)
    for kind, pair in bound._programs.items():
        tokens, width = (where.patches, "c") if "vision" in kind else (where.tokens, "m")
        if "vision" in kind and not header.visual:
            continue
        sizes = {**tokens.sizes, width: bound.splits.insides[kind].sizes[width]}
        sent = [program.bytes_sent(rank=rank, itemsize=1, **sizes) for program in pair]
        total += BLOCKS[kind] * sum(map(sum, sent))
        again += BLOCKS[kind] * sent[0].forward
    return total, again


def row_elements(move, width, times=1) -> int:
    """Elements that a move of rows sends there and back."""
    if move.moves is None:
        return 0
    sides = (move.moves.send, move.moves.receive)
    rows = sum(len(rows) for side in sides for k, rows in side.items() if k != move.moves.me)
    return rows * width * times


def traffic(path, raw, name):
    """What a step sends, what its programs say, and which collectives there were."""
    run = Run(Config.from_dict(raw), path, seed=1)
    batch, bound, me = batches(run.config)[name], run.bound, dist.get_rank()
    (header,) = run.headers(batch)
    with messages() as sent, collectives() as calls:
        run.forward_backward(batch)
        clip_gradients(run.trained, 1.0, run.counted)
    at = bound.step(header)
    expected, _ = door_elements(run, header, me)
    levels = 1 + len(run.config.vision.deepstack_visual_indexes)
    expected += row_elements(at._merged, levels * 64) if header.visual else 0
    heads = bound.splits.heads("text", bound.config.heads["text"])
    kv = at._schedules["text"].kv
    expected += row_elements(kv, heads.kv * heads.width, 2 * BLOCKS["text.attention"])
    summed = sum(
        -(-2 * (call.ranks - 1) * call.elements // call.ranks)
        for call in calls
        if call.made == SUM
    )
    return sum(sent) + summed, expected, {call.made for call in calls}


def pytest_generate_tests(metafunc):
    """Every plan on several kinds of batch, and four ranks, with ``--all-pairs``."""
    thorough = metafunc.config.getoption("all_pairs")
    if "key" in metafunc.fixturenames:
        metafunc.parametrize("key", PLANS, ids=lambda key: f"{key[0]}-{key[1]}")
        metafunc.parametrize("name", TURNS if thorough else [BATCH])
    elif "world" in metafunc.fixturenames:
        metafunc.parametrize("world", REGATHERED if thorough else [2])
        metafunc.parametrize("name", [BATCH, TEXT] if thorough else [BATCH])


def test_a_step_sends_what_its_programs_say(key, name, ranks, tmp_path):
    path = write_plan_of(tmp_path / "split.py", *PLANS[key])
    for sent, expected, calls in ranks(key[0]).run(traffic, path, raw(), name):
        assert sent == expected
        all_cut = PLANS[key][2:4] == ("(img@dp.home s)@tp c", "b@dp.home s@tp m")
        assert calls <= TO_STORE if all_cut else calls <= {*TO_STORE, SUM}


class Step(NamedTuple):
    """A step of one rank.

    Attributes:
      gradients: in the order of the parameters.
      entered: how often an inside was entered.
      sent: elements that activations needed to be sent.
      enters: of these, what the ways in send once, by their programs.
      bytes_kept: alive between forward and backward.
      saved: by inside, how many bytes more all entered tokens are than this rank's own.
    """

    gradients: list
    entered: int
    sent: int
    enters: int
    bytes_kept: int
    saved: dict


def regathered(path, raw, name) -> Step:
    run = Run(Config.from_dict(raw), path, seed=1)
    batch, enter, entered, kept = batches(run.config)[name], doors.Door.enter, [], []
    (header,) = run.headers(batch)
    with pytest.MonkeyPatch.context() as patch, messages() as sent:
        patch.setattr(doors.Door, "enter", lambda *args: (entered.append(1), enter(*args))[1])
        run.forward_backward(batch)
    gradients = [local_part(x.grad) for x in run.trained]
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as counted:
        patch.setattr(torch.Tensor, "backward", lambda loss: kept.append(counted.alive()))
        run.one_forward_backward(batch, header, run.bound.step(header))
    _, enters = door_elements(run, header, dist.get_rank())
    return Step(gradients, len(entered), sum(sent), enters, *kept, saved_bytes(run, header))


def saved_bytes(run, header) -> dict[str, int]:
    bound, saved, me = run.bound, {}, dist.get_rank()
    where = bound.layouts(header)
    for kind in bound._programs:
        site, tokens = (
            ("vision", where.patches) if "vision" in kind else ("text", where.tokens)
        )
        own, entered = (
            prod(one.local_shape(me)[:-1]) for one in (tokens, bound._entered(tokens, site))
        )
        saved[kind] = BLOCKS[kind] * 4 * WIDTHS[site] * (entered - own)
    return saved


AGAIN = {"regather": '("text", "vision")'}
KEPT = {"checkpoint": {"text": 1, "vision": 1}}
REGATHERED = {
    2: ("dp=1, tp=2", TP | VISION, "(img@dp.home s)@tp c", "b@dp.home s@tp m", "{}"),
    4: ("dp=1, cp=2, tp=2", TP, HOME, "(smp@dp.home s@cp.zigzag)@tp m",
        '{"text": ring("cp", overlap=True)}'),
}


def test_gathering_again_keeps_less_and_changes_no_bit(world, name, ranks, tmp_path):
    found = {}
    for case, fields in {"plain": {}, "again": AGAIN, "kept": KEPT, "both": KEPT | AGAIN}.items():
        path = write_plan_of(tmp_path / f"{case}.py", *REGATHERED[world], fields)
        found[case] = ranks(world).run(regathered, path, raw(), name)
    blocks = {kind: n for kind, n in BLOCKS.items() if kind in found["plain"][0].saved}
    for rank in range(world):
        plain, again, kept, both = (found[case][rank] for case in ("plain", "again", "kept", "both"))
        for other in (again, kept, both):
            for gradient, right in zip(other.gradients, plain.gradients, strict=True):
                assert torch.equal(gradient, right)
        entered = sum(blocks.values())
        assert [x.entered for x in (plain, again, kept, both)] == [
            entered, 2 * entered, 2 * entered, 2 * entered
        ]
        assert again.sent - plain.sent == again.enters and both.sent == kept.sent
        assert plain.bytes_kept - again.bytes_kept == sum(plain.saved.values())
        assert both.bytes_kept == kept.bytes_kept
