"""What a frame costs: measured, saved with a checkpoint, and taken from there."""

import pytest
import torch

from model.checkpoint.export import COST_FILE
from model.config.config import ConfigError
from model.training.measure import cost_text, kept_cost, measure_cost
from tests.tiny import tiny_config


def test_a_measured_cost_is_two_numbers_that_are_not_negative():
    a, b = measure_cost(tiny_config(), torch.device("cpu"))
    assert a >= 0
    assert b >= 0
    assert a + b > 0


def test_a_saved_cost_comes_back_as_it_was(tmp_path):
    assert kept_cost(tmp_path) is None
    (tmp_path / COST_FILE).write_text(cost_text((1.25e-9, 1 / 3)))
    assert kept_cost(tmp_path) == (1.25e-9, 1 / 3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        '{"a": 1}',
        '{"a": "x", "b": 1}',
        '{"a": null, "b": 1}',
        '{"a": -1, "b": 1}',
        '{"a": NaN, "b": 1}',
        '{"a": 0, "b": 0}',
        '{"a": 1e308, "b": 1}',
        f'{{"a": {10**400}, "b": 1}}',
        "[" * 100_000,
    ],
)
def test_a_file_that_holds_no_cost_is_refused_by_name(tmp_path, text):
    (tmp_path / COST_FILE).write_text(text)
    with pytest.raises(ConfigError, match=COST_FILE):
        kept_cost(tmp_path)
