"""Whether a plan computes what another does: the command's parts, and both sides on real ranks."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.training.parity import LOSSES, Difference, compared, judged, table
from model.training.parity_rank import measure
from model.training.settings import Settings
from tests.train_folder import CPU, make_folder, options

ALIKE = [Difference("a", 3.0, 3e-6), Difference("b", 4.0, 0.0), Difference("noise", 1e-9, 2e-9)]


def test_what_is_alike_is_told_by_norms():
    assert judged([2.5], [2.500001], ALIKE, 1e-5) == []
    assert judged([2.5, 1.0], [2.5, 1.1], ALIKE, 1e-5) == ["loss of batch 2: 1, expected 1.1"]
    found = judged([], [], [*ALIKE, Difference("c", 1.0, 2e-5), Difference("d", 0, math.inf)], 1e-5)
    assert found == ["c: off by 2e-05, 2e-05 of its norm", "d: one of them has no gradient"]


def test_the_worst_gradients_come_first():
    names = ["mine.py (2 ranks)", "plans.single (1 rank)"]
    worst = sorted(ALIKE, key=lambda d: -d.relative)
    assert [*table([2.5], [2.75], worst, names)] == [
        "loss      mine.py (2 ranks)   plans.single (1 rank)   difference",
        "batch 1   2.50000000   2.75000000   2.50e-01",
        "gradient  relative difference  norm",
        "noise                2.00e+00  1.000e-09",
        "a                    1.00e-06  3.000e+00",
        "b                    0.00e+00  4.000e+00",
    ]


def of_plan(options, folder):
    return measure(Settings(**options), Path(folder), CPU)


def test_a_plan_is_compared_with_one_process(ranks, tmp_path):
    given = options(make_folder(tmp_path / "run"), steps=2, shuffle=True)
    sides = {"found": ("decoder_tp", 2), "reference": ("single", 1)}
    for name, (plan, world) in sides.items():
        (tmp_path / name).mkdir()
        chosen = given | {"plan": f"plans/{plan}.py"}
        assert ranks(world).run(of_plan, chosen, str(tmp_path / name), timeout=60) == [0] * world
    losses = [json.loads((tmp_path / name / LOSSES).read_text()) for name in sides]
    differences = [*compared(tmp_path / "found", tmp_path / "reference")]
    assert len(differences) > 100 and all(d.norm > 0 for d in differences)
    assert len(losses[0]) == 2 and judged(*losses, differences, 1e-5) == []
    spoilt = sorted((tmp_path / "found").glob("*.safetensors"))[7]
    ((name, gradient),) = load_file(spoilt).items()
    save_file({name: gradient * 1.01}, spoilt)
    (fault,) = judged(*losses, [*compared(tmp_path / "found", tmp_path / "reference")], 1e-5)
    assert fault.startswith(f"{name}: off by ")
    spoilt.unlink()
    (fault,) = judged(*losses, [*compared(tmp_path / "found", tmp_path / "reference")], 1e-5)
    assert fault == f"{name}: one of them has no gradient"


@pytest.mark.parametrize("shape", [(2,), (3, 1)])
def test_gradients_of_another_shape_are_not_alike(tmp_path, shape):
    for name, tensor in (("one", torch.ones(3)), ("other", torch.ones(shape))):
        (tmp_path / name).mkdir()
        save_file({"weight": tensor}, tmp_path / name / "000000.safetensors")
    (found,) = compared(tmp_path / "one", tmp_path / "other")
    assert found.distance == math.inf
