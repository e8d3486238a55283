"""Index tensors of a step go to a device in one copy; tested with a device that is not there."""

import numpy as np
import pytest
import torch

from tests.simulate import config_of, draw_header
from vlshard import Mesh, Plan, gather, replicate, ring, ulysses
from vlshard.comm import ahead
from vlshard.comm.ahead import Index, send_ahead

CUDA = torch.device("cuda")


@pytest.fixture
def copies(monkeypatch):
    """Each copy to a device, kept on the CPU."""
    made = []

    def copy(x, device):
        assert device == CUDA
        made.append(x)
        return x.clone()

    monkeypatch.setattr(ahead, "move_pinned", copy)
    return made


def test_indices_go_in_one_copy(copies):
    indices = [Index(np.array(rows, np.int64), {}) for rows in ([3, 1], [], [7])]
    send_ahead(indices, CUDA)
    assert [x.tolist() for x in copies] == [[3, 1, 7]]
    assert [indices[i].on(CUDA).tolist() for i in (0, 2)] == [[3, 1], [7]]
    send_ahead(indices[:1], CUDA)
    assert len(copies) == 1


def test_nothing_is_sent_to_the_cpu(copies):
    index = Index(np.array([3, 1]), {})
    send_ahead([index], torch.device("cpu"))
    assert copies == [] and index.copies == {}


@pytest.mark.parametrize("mode", [gather("cp"), ulysses("cp"), ring("cp")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_sends_all_that_it_is_indexed_by(copies, mode, dtype):
    plan = Plan(
        Mesh(dp=4, cp=2),
        {"**": replicate()},
        {"vision.patches": "(img@dp.home s@cp) c", "text.tokens": "b@dp.home s@cp.zigzag m"},
        {"vision": mode, "text": mode},
    )
    bound = plan.bind(config_of(), 8)
    at = bound.seen_from(3).step(draw_header(bound, seed=1))
    at.send_ahead(CUDA, dtype)
    at.send_ahead(CUDA, dtype)
    schedules = at._schedules.values()
    wanted = [i for one in schedules for i in one.indices("cuda", dtype) if i.rows.size]
    assert len(copies) == bool(wanted)
    for index in wanted:
        assert index.copies[CUDA].tolist() == index.rows.tolist()
