"""The switch for debugging: two ranks that ask for different moves both say so."""

import re
import time

import pytest
import torch
import torch.distributed as dist

from vlshard import Mesh, ShardError, compare_calls, reshard, start

FIX = "\n  fix: every rank makes the same calls, in the same order"


def raised(attempt):
    """The text of what a block of compared calls raises, with lines of this file masked."""
    mesh = Mesh(cp=dist.get_world_size())
    with pytest.raises(ShardError) as error, compare_calls(mesh, seconds=20):
        attempt(mesh, dist.get_rank() == 1)
    dist.barrier()
    return re.sub(r"\S*test_compare_calls.py:\d+", "HERE", str(error.value))


def arrow(mesh, other):
    reshard(torch.ones(2, 4), "s h@cp -> s h" if other else "s@cp h -> s h@cp", mesh)


def shape(mesh, other):
    reshard(torch.ones(3 if other else 2, 4), "s@cp h -> s h", mesh)


def dtype(mesh, other):
    start(torch.ones(2, 4, dtype=torch.bfloat16 if other else None), "s@cp h -> s h", mesh).wait()


def kind(mesh, other):
    (start if other else reshard)(torch.ones(2), "s@cp -> s", mesh)


def given_size(mesh, other):
    reshard(torch.ones(2), "s@cp -> s", mesh, s=3 if other else 4)


def gradient(mesh, other):
    reshard(torch.ones(2, requires_grad=other), "s@cp -> s", mesh)


def typo(mesh, other):
    reshard(torch.ones(2), "s@xp -> s" if other else "s@cp -> s", mesh)


def fewer(mesh, other):
    for _ in range(1 if other else 2):
        reshard(torch.ones(2), "s@cp -> s", mesh)


def backward(mesh, other):
    x = torch.ones(2, requires_grad=True)
    y, z = reshard(x, "s@cp -> s", mesh), reshard(x, "s@cp -> s", mesh)
    (y if other else y + z).sum().backward()


def cases(names):
    return [raised(globals()[name]) for name in names]


EXPECTED = {
    "arrow": "\n  arrow: s@cp h -> s h@cp on rank 0; s h@cp -> s h on rank 1\n  sizes: ",
    "shape": '\n  sizes: {"h": "4", "s": "4"} on rank 0; {"h": "4", "s": "6"} on rank 1',
    "dtype": "\n  dtype: torch.float32 on rank 0; torch.bfloat16 on rank 1",
    "kind": "\n  call: reshard (call 1) on rank 0; start (call 1) on rank 1",
    "gradient": "\n  gradient: false on rank 0; true on rank 1",
    "fewer": "\n  call: reshard (call 2) on rank 0; the end of the block (call 2) on rank 1",
    "backward": "\n  call: backward of call 2 (call 3) on rank 0; backward of call 1 (call 3) on rank 1",
}


def test_both_ranks_are_shown(ranks):
    first, second = ranks(2).run(cases, list(EXPECTED), timeout=90)
    assert first == second
    for text, line in zip(first, EXPECTED.values(), strict=True):
        assert text.startswith("ranks make different calls")
        assert line in text
        assert text.endswith(FIX)
    assert "\n  from: HERE on rank 0" not in first[1]  # one line of this file made both calls


def test_what_one_rank_cannot_do_is_told_by_all(ranks):
    first, second = ranks(2).run(cases, ["typo", "given_size"], timeout=90)
    assert first == [f"rank 1: {text}" for text in second]
    assert second[0].startswith("unknown mesh axis 'xp'\n  s@xp -> s\n")
    assert second[1].startswith("the tensor of rank 1 has shape (2,), the layout gives it (1,)")


def alike():
    """Calls that are the same go through, whatever the order of waits; nothing is left behind."""
    mesh = Mesh(cp=2)
    x = torch.arange(8.0).reshape(2, 4).requires_grad_()
    with compare_calls(mesh):
        p, q = (start(x * k, "s@cp h -> s h@cp", mesh) for k in (1, 2))
        waited = [p.wait(), q.wait()] if mesh.rank else [q.wait(), p.wait()][::-1]
        y = reshard(x, "s@cp h -> s h", mesh) * 3
        (sum(z.sum() for z in waited) + y.sum()).backward()
        part = Mesh(cp=1, ranks=[mesh.rank])
        reshard(x, "s h -> s h@cp", part)  # over other ranks: not compared
    return x.grad.unique().tolist()


def test_calls_that_are_alike_go_through(ranks):
    assert ranks(2).run(alike) == [[9.0]] * 2


def absent():
    """Rank 1 makes no call and does not leave the block; rank 0 does not wait for ever."""
    mesh = Mesh(cp=2)
    started = time.monotonic()
    if mesh.rank:
        with pytest.raises((ShardError, RuntimeError)), compare_calls(mesh, seconds=2):
            time.sleep(4)
        return None
    with pytest.raises(ShardError) as error, compare_calls(mesh, seconds=2):
        reshard(torch.ones(2), "s@cp -> s", mesh)
    assert time.monotonic() - started < 10
    return str(error.value)


def test_a_rank_that_makes_no_call_is_not_waited_for(ranks):
    text, _ = ranks(2).run(absent, timeout=30)
    assert re.match(r"other ranks did not come to reshard \(from .*:\d+\) within \d+ s\n", text)
