"""Steps of many ranks in one process; ``make parity`` goes through all plans and drawn ones."""

import numpy as np
import pytest
import torch

from tests.drawn_plans import draw_plan, draw_split_plan
from tests.simulate import (
    FAR,
    config_of,
    entered_and_left,
    planned,
    simulated,
    text_places,
)
from tests.simulate import handed_off as hand_off_of
from tests.simulate_dispatch import sent_by
from vlshard import Mesh, Plan, gather, hybrid, load_plan, replicate, ring, ulysses
from vlshard.comm import Hosts

SPLIT = Mesh(dp=2, cp=(2, 4))
PLANS = [
    ("(img@dp.home s@cp) c", "b@dp.home s@cp.zigzag m", ulysses("cp"), gather("cp")),
    ("(img@(dp cp).balance s) c", "(smp@dp.home s)@cp m", None, ring("cp")),
    (
        "(img@dp.home s)@cp c",
        "(smp@dp.home s@cp.zigzag) m",
        hybrid(ulysses="cp.1", ring="cp.0"),
        hybrid(ulysses="cp.1", gather="cp.0"),
    ),
]


@pytest.mark.parametrize(("patches", "tokens", "vision", "text"), PLANS)
def test_every_send_meets_its_receive_and_results_are_the_whole(patches, tokens, vision, text):
    modes = {"vision": vision, "text": text}
    plan = Plan(
        SPLIT,
        {"**": replicate()},
        {"vision.patches": patches, "text.tokens": tokens},
        {site: mode for site, mode in modes.items() if mode},
    )
    gap, messages = simulated(plan, config_of(), 16)
    assert gap < FAR and messages > 0


def test_a_shipped_plan_of_many_ranks():
    gap, messages = simulated(load_plan("plans/vision_dealt.py", 64), config_of(), 64)
    assert gap < FAR and messages > 0


def test_a_message_that_nobody_awaits_is_found():
    config = config_of()
    step = planned(load_plan("plans/vision_dealt.py", 16), config, 16, seed=0)
    rows, _, _, places = text_places(step)
    assert hand_off_of(step, rows, places)[0] == 0
    moves = next(at._merged.moves for at in step.ranks if at._merged.moves.rows_received)
    sender = next(k for k in moves.receive if k != moves.me)
    moves.receive[sender] = np.empty(0, np.int64)
    with pytest.raises(AssertionError):
        hand_off_of(step, rows, places)


def test_drawn_plans_are_the_same_each_time():
    assert draw_plan(3) == draw_plan(3) and 16 <= draw_plan(3).mesh.size <= 1024


@pytest.mark.parametrize("seed", [3, 20, 27])
def test_drawn_plans_with_splits(seed):
    plan = draw_split_plan(seed)
    assert simulated(plan, config_of(), plan.mesh.size, seed)[0] < FAR


def test_a_term_that_is_not_summed_is_found():
    step = planned(load_plan("plans/decoder_tp_cp.py", 8), config_of(), 8, seed=0)
    assert entered_and_left(step)[0] == 0
    moves = step.ranks[0]._doors["text.attention"].out.stages[0][0].moves
    peer = next(k for k in moves.receive if k != moves.me)
    moves.receive[peer] = moves.receive[peer][:0]
    with pytest.raises(AssertionError):
        entered_and_left(step)


@pytest.mark.parametrize(
    ("mesh", "experts", "tokens"),
    [
        ({"dp": 4, "tp": 2}, "e@(dp tp) f", "b@dp.home s@tp m"),
        ({"dp": 2, "cp": 2, "tp": 4}, "e@(tp cp) f@dp", "b@dp.home s@cp m"),
        ({"dp": 2, "cp": 4}, "e@cp f", "(smp@dp.home s)@cp m"),
    ],
)
def test_tokens_visit_their_experts_once(mesh, experts, tokens):
    layouts = {"vision.patches": "(img@dp.home s) c", "text.tokens": tokens}
    modes = {"text": gather("tp" if "tp" in tokens else "cp")}
    plan = Plan(Mesh(**mesh), {"**": replicate()}, layouts, modes, splits={"text.experts": experts})
    gap, messages = simulated(plan, config_of(), plan.mesh.size)
    assert gap < FAR and messages


def test_rows_that_a_rank_sends_for_its_tokens_are_counted():
    # Two ranks, four experts: token 0 needs both of the other, token 1 one, token 2 none.
    hosts = Hosts([np.array([0, 1]), np.array([2, 3])], 4)
    experts = torch.tensor([[2, 3], [0, 3], [1, 0]])
    assert sent_by(hosts, experts) == (2, 3, 3, 1)
