"""Tokens visit their experts in one process: made-up routing, all ranks, and what is sent.

``python -m tests.simulate_dispatch`` prints how many rows a rank sends to others for its tokens,
beside sending them once for each expert, or gathering all tokens: by drawn routing, even or skewed.
"""

from typing import NamedTuple

import numpy as np
import torch

from vlshard.comm.dispatch import Hosts

WIDTH = 2


class Sent(NamedTuple):
    """Rows that a rank sends to others: as they are, once for each expert, to all of a group."""

    once: int
    by_expert: int
    gathered: int
    messages: int


def draw_experts(tokens, num_experts, top, seed, skew=0.0):
    """Different experts for each token; with skew, expert e is the less probable the larger e."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num_experts, generator=draw, dtype=torch.float64)
    scores = -torch.log(-torch.log(scores)) - skew * torch.arange(num_experts).log1p()
    return scores.topk(top, dim=-1).indices


def leaving_of(hosts, experts):
    return hosts.leaving(experts, torch.arange(len(experts)), len(experts))


def sent_by(hosts, experts):
    """What a rank sends for its tokens."""
    rows, pairs = leaving_of(hosts, experts).counts.T
    others = torch.arange(len(rows)) != hosts.me
    once, by_expert, messages = rows[others].sum(), pairs[others].sum(), (rows[others] > 0).sum()
    return Sent(int(once), int(by_expert), (len(rows) - 1) * len(experts), int(messages))


def dispatched(step, text_rows, lengths, seed=0):
    """The largest difference of computed tokens from the whole, and how many messages.

    An expert is a number, cut into as many parts as ranks share it.
    """
    bound, messages = step.bound, 0
    hosts = [at._hosts["text.experts"] for at in step.ranks]
    inside = bound.splits.insides["text.experts"]
    e, top = inside.sizes["e"], bound.config.text.num_experts_per_tok
    experts = draw_experts(int(lengths.sum()), e, top, seed)
    shares = torch.rand(experts.shape, generator=torch.Generator().manual_seed(seed)).double()
    travel, same = bound.splits.travelling(bound.tokens, "text.experts")
    cut = bound.splits.cuts("text.experts").get("f", ())
    parts = bound.mesh.span([str(axis) for split in cut for axis in split.axes])
    own = [torch.as_tensor(rows) for rows in text_rows]
    leaving = [leaving_of(host, experts[rows]) for host, rows in zip(hosts, own, strict=True)]
    sums = [torch.zeros(len(rows), WIDTH).double() for rows in own]
    for rank, left in enumerate(leaving):
        begin, peers = 0, bound.mesh.peers(travel, rank)
        for member, (rows, pairs) in enumerate(left.counts.tolist()):
            piece = slice(begin, begin + pairs)
            row, code = left.row[piece], left.code[piece]
            there = hosts[peers[member]]
            number = torch.as_tensor(there.held[there.me])[code // 2]
            which = left.order[piece] // hosts[rank].members.shape[1]
            assert torch.equal(experts[own[rank]].flatten()[which], number), "another expert's rank"
            assert rows == int((code % 2).sum()) == len(row.unique()), "a row is not sent once"
            weight = shares[own[rank]].flatten()[which] * (1 + number) / parts
            values = 1.0 + own[rank][row].double()
            sums[rank].index_add_(0, row, (weight * values)[:, None].expand(-1, WIDTH))
            messages += bool(pairs) and peers[member] != rank
            begin += pairs
    whole = (1.0 + torch.arange(len(experts))) * (shares * (1 + experts)).sum(1)
    gap = 0.0
    for rank, rows in enumerate(own):
        total = sum(sums[peer] for peer in bound.mesh.peers(same, rank))
        gap = max(gap, float((total[:, 0] - whole[rows]).abs().max()) if len(rows) else 0.0)
    return gap, messages


def main():
    tokens, e, top = 4096, 128, 8
    print(f"{tokens:,} tokens a rank, {e} experts, {top} a token: rows a rank sends on average")
    print(f"{'ranks':>5}  {'routing':8}{'once a rank':>12}{'once an expert':>16}{'to all':>10}")
    for ranks in (4, 8, 16, 32):
        held = np.arange(e).reshape(ranks, -1)
        for name, skew in (("even", 0.0), ("skewed", 1.0)):
            found = [
                sent_by(Hosts(held, e, rank), draw_experts(tokens, e, top, rank, skew))
                for rank in range(ranks)
            ]
            each = [round(sum(kind) / ranks) for kind in zip(*found, strict=True)]
            print(f"{ranks:>5}  {name:8}{each[0]:>12,}{each[1]:>16,}{each[2]:>10,}")


if __name__ == "__main__":
    main()
