"""Rows that visit experts: values, gradients and what is sent, against dense arithmetic.

Experts are numbers, which are cut into parts where members share one; all numbers are small
integers or eighths, so that fp64 is exact in any order.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from vlshard import Mesh
from vlshard.comm import transport
from vlshard.comm.dispatch import Hosts, Visits

WIDTH, TOP = 3, 2
# Per number of ranks and what it is: mesh, axes over which rows travel, axes over which they are
# the same, axes that cut experts, and axes that cut each expert into parts.
CUTS = {
    (2, "experts over ranks with other rows"): ({"dp": 2}, ("dp",), (), ("dp",), ()),
    (2, "parts of all experts"): ({"dp": 2}, ("dp",), (), (), ("dp",)),
    (2, "rows stay, experts are elsewhere"): ({"tp": 2}, (), ("tp",), ("tp",), ()),
    (2, "rows stay, experts in parts"): ({"tp": 2}, (), ("tp",), (), ("tp",)),
    (4, "experts over both axes"): ({"dp": 2, "cp": 2}, ("dp", "cp"), (), ("dp", "cp"), ()),
    (4, "the other way round"): ({"dp": 2, "cp": 2}, ("dp", "cp"), (), ("cp", "dp"), ()),
    (4, "experts and parts"): ({"dp": 2, "cp": 2}, ("dp", "cp"), (), ("dp",), ("cp",)),
    (4, "rows the same over one"): ({"cp": 2, "tp": 2}, ("cp",), ("tp",), ("cp", "tp"), ()),
    (4, "rows the same, in parts"): ({"cp": 2, "tp": 2}, ("cp",), ("tp",), ("cp",), ("tp",)),
    (4, "copies of experts"): ({"dp": 2, "cp": 2}, ("cp",), (), ("cp",), ()),
}
EXPERTS = 4
# Rows by rank of the travelling axes (cut to as many as there are), and how experts are chosen.
LOADS = {
    "uneven": ((5, 3, 7, 2), "random"),
    "some ranks empty": ((0, 4, 0, 6), "random"),
    "all empty": ((0, 0, 0, 0), "random"),
    "all to one": ((4, 3, 2, 1), "first"),
    "one row": ((0, 1, 0, 0), "random"),
}


def number(place, axes, mesh):
    """A rank's number along some axes."""
    found = 0
    for axis in axes:
        found = found * mesh[axis] + place[axis]
    return found


def held_by(place, cut):
    """The experts of a rank, and which of how many parts of each."""
    mesh, _, _, by_expert, by_part = cut
    ranks = int(np.prod([mesh[axis] for axis in by_expert], dtype=int))
    parts = int(np.prod([mesh[axis] for axis in by_part], dtype=int))
    each = EXPERTS // ranks
    first = number(place, by_expert, mesh) * each
    return np.arange(first, first + each), number(place, by_part, mesh), parts


def rows_of(place, cut, load):
    """Rows, experts and shares of a rank: the same on ranks that have the same."""
    mesh = cut[0]
    counts, choice = LOADS[load]
    alone = [axis for axis in mesh if axis not in cut[2]]
    me = number(place, alone, mesh)
    draw = torch.Generator().manual_seed(me)
    count = counts[me % len(counts)]
    x = torch.randint(-9, 9, (count, WIDTH), generator=draw).double()
    chosen = torch.rand(count, EXPERTS, generator=draw)
    if choice == "first":
        chosen[:, 0] = 2.0
    experts = chosen.topk(TOP, dim=-1).indices
    shares = torch.randint(1, 8, (count, TOP), generator=draw).double() / 8
    return x, experts, shares


def scales(parts):
    """What each expert multiplies by, in so many parts."""
    return torch.arange(1, 1 + EXPERTS * parts).view(EXPERTS, parts).double()


def dispatched(cut, load):
    """One rank's results, checked against dense arithmetic on all rows."""
    sizes, travelling, same, _, _ = cut
    mesh, rank = Mesh(**sizes), dist.get_rank()
    place = mesh.coords(rank)
    group = mesh.group(travelling) if travelling else None
    peers = list(mesh.peers(travelling, rank)) if travelling else [rank]
    held = [held_by(mesh.coords(peer), cut)[0] for peer in peers]
    beside = mesh.group(same) if same else None
    hosts = Hosts(held, EXPERTS, peers.index(rank), group, beside)
    own, part, parts = held_by(place, cut)
    x, experts, shares = rows_of(place, cut, load)
    x.requires_grad_(), shares.requires_grad_()
    scale = scales(parts)[own, part].requires_grad_()

    sent = []
    with pytest.MonkeyPatch.context() as patch:
        whole = transport.launch
        patch.setattr(transport, "launch", lambda *a: (sent.append(a[0]), whole(*a))[1])
        visits = hosts.visits(experts, torch.arange(len(x)), len(x))
        rows, each = visits.dispatch(x, shares)
        weighted = rows[visits.row] * (scale[visits.expert] * each)[:, None]
        out = visits.combine(torch.zeros_like(rows).index_add(0, visits.row, weighted))
    check_messages(cut, load, peers, sent)
    total = scales(parts).sum(1)
    torch.testing.assert_close(
        out, x * (total[experts] * shares).sum(1, keepdim=True), rtol=0, atol=0
    )

    seed = torch.arange(out.numel()).view_as(out).double() + 100 * rank
    out.backward(seed)
    copies = [100 * peer for peer in mesh.peers(same, rank)] if same else [100 * rank]
    whole_seed = sum(seed - 100 * rank + first for first in copies)
    check_sums(mesh, same, x.grad, whole_seed * (total[experts] * shares).sum(1, keepdim=True))
    check_sums(mesh, same, shares.grad, (whole_seed * x).sum(1, keepdim=True) * total[experts])
    check_scales(mesh, cut, load, scale.grad, own)


def check_sums(mesh, same, found, wanted):
    """Terms of ranks that have the same rows sum to the whole gradient."""
    found = found.clone()
    if same:
        dist.all_reduce(found, group=mesh.group(same))
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=0)


def check_scales(mesh, cut, load, found, own):
    """An expert's gradient is of all rows that can come here, each once."""
    _, travelling, same, _, _ = cut
    rank, wanted = dist.get_rank(), torch.zeros(EXPERTS).double()
    peers = mesh.peers(travelling, rank) if travelling else [rank]
    for peer in peers:
        x, experts, shares = rows_of(mesh.coords(peer), cut, load)
        seed = torch.arange(x.numel()).view_as(x).double()
        copies = mesh.peers(same, peer) if same else [peer]
        seed = sum(seed + 100 * copy for copy in copies)
        dots = (seed * x).sum(1, keepdim=True) * shares
        wanted.index_add_(0, experts.flatten(), dots.flatten())
    torch.testing.assert_close(found, wanted[own], rtol=0, atol=0)


def check_messages(cut, load, peers, sent):
    """Counts, pairs, rows and shares there, rows back: a row once to each member that needs it."""
    if len(peers) == 1:
        assert not sent
        return
    mesh, rank = Mesh(**cut[0]), dist.get_rank()
    counts, numbers, rows, shares, _ = ([len(each[k]) for k in range(len(peers))] for each in sent)
    _, experts, _ = rows_of(mesh.coords(rank), cut, load)
    held = [set(held_by(mesh.coords(peer), cut)[0].tolist()) for peer in peers]
    needed = [[held[k] & set(row.tolist()) for row in experts] for k in range(len(peers))]
    assert counts == [1] * len(peers)
    assert rows == [sum(map(bool, member)) for member in needed]
    assert numbers == shares == [sum(map(len, member)) for member in needed]


def every_load(cut):
    for load in LOADS:
        dispatched(cut, load)


@pytest.mark.parametrize("cut", CUTS, ids=lambda key: f"{key[0]}-{key[1]}")
def test_rows_visit_experts_once_and_come_home_summed(cut, ranks):
    ranks(cut[0]).run(every_load, CUTS[cut])


def rounded(dtype):
    """One row's results in half precision from four members: 256 + 1 + 1 + 1 = 259, or 2051."""
    mesh = Mesh(dp=4)
    hosts = Hosts([np.array([k]) for k in range(4)], 4, dist.get_rank(), mesh.group(("dp",)))
    terms = torch.ones(4)
    terms[dist.get_rank()] = 256.0 if dtype == torch.bfloat16 else 2048.0
    x = torch.ones(1, 8, dtype=dtype, requires_grad=True)
    visits = hosts.visits(torch.arange(4)[None], torch.arange(1), 1)
    rows, each = visits.dispatch(x, terms[None])
    out = visits.combine(rows[visits.row] * each[:, None].to(dtype))
    out.backward(torch.ones_like(out))
    return out[0].tolist(), x.grad[0].tolist(), each.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "total"), [(torch.bfloat16, 260), (torch.float16, 2052)])
def test_half_precision_is_summed_in_fp32_and_rounded_once(ranks, dtype, total):
    assert ranks(4).run(rounded, dtype) == [([total] * 8, [total] * 8, True)] * 4


def test_without_ranks_every_expert_is_here():
    experts = torch.tensor([[2, 0], [1, 2], [0, 1]])
    x, shares = torch.randn(3, WIDTH), torch.rand(3, 2)
    visits = Visits.here(experts, torch.arange(3), 3)
    rows, each = visits.dispatch(x, shares)
    assert rows is x and torch.equal(each, shares.flatten())
    assert visits.row.tolist() == [0, 0, 1, 1, 2, 2]
    assert visits.expert.tolist() == experts.flatten().tolist()
    assert visits.combine(x) is x
