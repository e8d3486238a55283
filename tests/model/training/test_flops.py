"""Operations of a step: against arithmetic by hand, and torch's count of matrix products."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.config.config import Config
from model.training.flops import forward_flops, step_flops
from tests.hf_oracle import hf_model, our_model
from tests.tiny import image, make_batch, sample, tiny_config, tiny_raw

ONE = sample([1, 2, *image((1, 4, 6)), 3, 4], (1, 4, 6))  # 12 tokens, 3 of them predicted
OTHER = sample([5, 6, 7, 8, 9, 10, 11])  # 7 tokens, 6 of them predicted

# Multiplications. Width 64, queries 64, keys and values 32 each; a router to 8 experts, of which 2
# of width 24 have three matrices each; 12 x 13 / 2 and 7 x 8 / 2 pairs of a query and a key.
LAYER = 19 * (64 * 64 * 2 + 64 * 32 * 2) + 2 * 64 * (78 + 28) + 19 * (64 * 8 + 2 * 3 * 64 * 24)
TEXT = 4 * LAYER + 9 * 64 * 96  # the head computes 9 rows of 96 tokens
# 24 patches of 96 values to 32; blocks with an inner width of 44 and 24 x 24 pairs; four mergers of
# 6 units, 4 x 32 wide, to 64.
BLOCK = 24 * (4 * 32 * 32 + 2 * 32 * 44) + 2 * 32 * 24 * 24
VISION = 24 * 96 * 32 + 3 * BLOCK + 4 * 6 * (128 * 128 + 128 * 64)


def test_a_forward_is_counted_as_by_hand():
    batch = make_batch(tiny_config(), ONE, OTHER)
    assert forward_flops(tiny_config(), batch.header.table) == (2 * VISION, 2 * TEXT)
    assert (VISION, TEXT) == (1_271_808, 1_782_784)


@pytest.mark.parametrize(
    ("trained", "flops"),
    [
        (["model.visual.merger.norm.weight", "lm_head.weight"], 6 * VISION + 6 * TEXT),
        (["lm_head.weight"], 2 * VISION + 6 * TEXT),
        (["model.visual.merger.norm.weight"], 6 * VISION + 4 * TEXT),
    ],
)
def test_what_is_frozen_counts_less(trained, flops):
    header = make_batch(tiny_config(), ONE, OTHER).header
    assert step_flops(tiny_config(), [header], trained) == flops
    assert step_flops(tiny_config(), [header, header], trained) == 2 * flops


def test_text_under_a_frozen_decoder_has_no_backward():
    header = make_batch(tiny_config(), OTHER).header
    forward = forward_flops(tiny_config(), header.table)
    assert forward.vision == 0
    trained = ["model.visual.merger.norm.weight"]
    assert step_flops(tiny_config(), [header], trained) == forward.text


def test_matrix_products_are_those_that_torch_counts():
    raw = tiny_raw(text={"num_experts": 0})  # torch counts no grouped product
    batch = make_batch(Config.from_dict(raw), ONE, ONE)
    model = our_model(raw, hf_model(raw))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch.inputs, batch.at)
    attention = 2 * (3 * 2 * 32 * 2 * 24 * 24 + 4 * 2 * 64 * 2 * 78)
    expected = sum(forward_flops(batch.config, batch.header.table)) - attention
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    assert counts["aten.mm"] + counts["aten.addmm"] == expected
