"""One planned step of every rank of a plan, carried out in one process, on small tensors.

``python -m tests.simulate --plan plans/vision_dealt.py --world 512`` plans a micro-batch as each of
the ranks has it (``BoundPlan.seen_from``), looks whether every send meets its receive, carries rows
as the moves say, attends as the schedules say, and compares with what one process computes over
all rows; then gradients of visual rows go back. Tokens enter and leave the blocks that a plan
splits, and so do gradients; they visit experts by made-up routing. ``--drawn 200`` does so for
random plans on 16 to 1,024 ranks, ``--shipped`` for all of ``plans/``; ``make parity`` runs both.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from model.config.config import Config
from tests.drawn_plans import draw_plan, draw_split_plan
from tests.simulate_dispatch import dispatched
from tests.tiny import tiny_raw
from vlshard import load_plan
from vlshard.attention import attend_runs
from vlshard.attention.modes import Ways
from vlshard.attention.ring_attention import RingPlan, _merge_pair
from vlshard.comm import RowMove
from vlshard.language import spec_axes
from vlshard.plan import SampleFacts, make_headers

WIDTH = 2
FAR = 1e-9  # fp64, sums of at most some hundred terms
SINGLE = "single"


class Step(NamedTuple):
    """What every rank has planned of one micro-batch."""

    bound: object
    header: object
    ranks: list
    layouts: object


def draw_header(bound, seed):
    """Samples of few tokens, each with up to three small images; some data ranks have none."""
    draw = np.random.default_rng(seed)
    facts = []
    for row in range(bound.data_ranks + int(draw.integers(0, 3))):
        grids, starts, tokens = [], [], int(draw.integers(1, 5))
        for _ in range(int(draw.integers(0, 3))):
            h, w = (2 * int(n) for n in draw.integers(1, 5, size=2))
            grids.append((1, h, w))
            starts.append(tokens)
            tokens += h * w // 4 + int(draw.integers(1, 4))
        facts.append(SampleFacts(row, tokens, 1, tuple(grids), tuple(starts)))
    (header,) = make_headers(facts, bound.data_ranks)
    return header


def planned(plan, config, world, seed):
    """A step of all ranks."""
    bound = plan.bind(config, world)
    header = draw_header(bound, seed)
    ranks = [bound.seen_from(rank).step(header) for rank in range(world)]
    return Step(bound, header, ranks, bound.layouts(header))


def carried(step, moves, axes, inputs):
    """What each rank has after a move, from what each had, and how many messages were sent."""
    mesh, count = step.bound.mesh, 0
    cut = [move._cut(x) for move, x in zip(moves, inputs, strict=True)]
    found = []
    for rank, move in enumerate(moves):
        if move.moves is None:
            found.append(cut[rank])
            continue
        mine, peers = move.moves, mesh.peers(axes, rank)
        assert peers[mine.me] == rank, f"rank {rank} takes itself for member {mine.me}"
        assert cut[rank].shape[0] == mine.rows, f"rank {rank} has {cut[rank].shape[0]} rows"
        out = cut[rank].new_zeros(mine.size, *cut[rank].shape[1:])
        for k, put in mine.receive.items():
            taken = moves[peers[k]].moves.send.get(mine.me, np.empty(0))
            assert taken.size == put.size, (
                f"{peers[k]} sends {taken.size} rows, {rank} awaits {put}"
            )
            out.index_add_(0, torch.from_numpy(put), cut[peers[k]][torch.from_numpy(taken)])
        for k in mine.send:
            assert mine.me in moves[peers[k]].moves.receive, f"{peers[k]} awaits nothing of {rank}"
            assert not (mine.local and k != mine.me), f"a local move of {rank} sends to {peers[k]}"
            count += k != mine.me
        found.append(move._join(out))
    return found, count


def whole_attention(q, k, v, lengths, causal):
    """Attention inside segments, over all rows."""
    groups, out, start = q.shape[1] // k.shape[1], torch.zeros_like(q), 0
    for length in lengths:
        here = slice(start, start + length)
        keys, values = (x[here].repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[here], keys) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
        out[here] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        start += length
    return out


def ring_out(step, schedules, rank, q, k, v, axes):
    """A rank's part of attention by a ring, from the blocks that come by."""
    plan, peers = schedules[rank].attended, step.bound.mesh.peers(axes, rank)
    out, lse = torch.zeros_like(q[rank]), q[rank].new_full(q[rank].shape[:2], -torch.inf)
    for turn, pairs in enumerate(plan.pairs):
        owner = peers[plan.owner(turn)]
        other = schedules[owner].attended
        assert (other.rows, other.reach) == (plan.rows, plan.reach), "ranks of a ring disagree"
        assert plan.arrives(turn) or not pairs, f"{rank} needs a block that does not come"
        for pair in pairs:
            _merge_pair(out, lse, q[rank], torch.stack([k[owner], v[owner]]), pair)
    return out


def attended(step, site, rows, lengths, causal):
    """The largest difference of a site's attention from the whole, and how many messages."""
    mode = step.bound.attention.get(site)
    heads = step.bound.splits.heads(site, step.bound.config.heads[site])
    ways = mode.ways if mode else Ways()
    schedules = [at._schedules[site] for at in step.ranks]
    draw = torch.Generator().manual_seed(0)
    size = int(np.sum(lengths))
    whole = [
        torch.randn(size, n, WIDTH, generator=draw, dtype=torch.float64)
        for n in (heads.q, heads.kv, heads.kv)
    ]
    kv_axes, messages, brought = (*ways.gather, *ways.ulysses), 0, []
    for x, name, axes in zip(
        whole, ("q", "kv", "kv"), (ways.ulysses, kv_axes, kv_axes), strict=True
    ):
        moves = [getattr(schedule, name) for schedule in schedules]
        found, count = carried(step, moves, axes, [x[own] for own in rows])
        brought.append(found)
        messages += count
    q, k, v = brought
    out = [
        ring_out(step, schedules, rank, q, k, v, ways.ring)
        if isinstance(schedule.attended, RingPlan)
        else attend_runs(q[rank], k[rank], v[rank], schedule.attended)
        for rank, schedule in enumerate(schedules)
    ]
    back, count = carried(step, [s.back for s in schedules], ways.ulysses, out)
    right = whole_attention(*whole, lengths, causal)
    gaps = [(x - right[own]).abs().max() for x, own in zip(back, rows, strict=True) if len(own)]
    return float(max(gaps, default=torch.zeros(()))), messages + count


def through(step, ways, blocks, *, back=False):
    """What each rank has after a program, or its backward, and how many messages were sent."""
    mesh, messages = step.bound.mesh, 0
    steps = zip(*(way.stages for way in ways), strict=True)
    stages = [[part for part, _ in stage] for stage in steps]
    for routes in reversed(stages) if back else stages:
        axes, dim = routes[0].axes, routes[0].dims[0]
        if routes[0].moves is None:
            groups = [mesh.peers(axes, rank) for rank in range(mesh.size)]
            blocks = [sum(blocks[peer] for peer in peers) for peers in groups]
            messages += sum(len(peers) - 1 for peers in groups)
            continue
        assert all(part.dims == (dim, dim) and part.axes == axes for part in routes)
        moves = [part.moves.reverse if back else part.moves for part in routes]
        rows = [x.movedim(dim, 0) for x in blocks]
        rows, count = carried(step, [RowMove(one, None, 1, 1) for one in moves], axes, rows)
        blocks, messages = [x.movedim(0, dim) for x in rows], messages + count
    return blocks, messages


def entered_and_left(step):
    """The largest difference of tokens that went through doors, both ways, and how many messages.

    Each rank's tokens are their own numbers. What comes out of an inside, and the gradients of what
    went in, are these times a factor of the rank: they add up over the ranks of the split, those
    that were gathered or all. A gradient of tokens that are whole is a term on each rank.
    """
    mesh, gap, messages = step.bound.mesh, 0.0, 0
    for kind in step.ranks[0]._doors:
        into, out = zip(*(at._doors[kind].ways for at in step.ranks), strict=True)
        axes = step.bound.splits.axes(kind)
        gathered = [part for part in axes if part in spec_axes(into[0].src.spec, mesh)]
        copies = mesh.span(axes) // mesh.span(gathered)
        own = [numbered(one.src, rank) for rank, one in enumerate(into)]
        entered = [numbered(one.dst, rank) for rank, one in enumerate(into)]
        terms = [(1 + rank % 7) * x for rank, x in enumerate(entered)]
        for ways, back, given, wanted in (
            (into, False, own, entered),
            (into, True, terms, summed(own, gathered, mesh)),
            (out, False, terms, summed(own, axes, mesh)),
            (out, True, own, [copies * x for x in entered]),
        ):
            found, count = through(step, ways, given, back=back)
            messages += count
            for x, right in zip(found, wanted, strict=True):
                assert x.shape == right.shape, f"{kind}: {tuple(x.shape)}, not {tuple(right.shape)}"
                gap = max(gap, float((x - right).abs().max()) if x.numel() else 0.0)
    return gap, messages


def summed(blocks, axes, mesh):
    """Each rank's rows times the factors of its peers along some axes."""
    return [
        sum(1 + peer % 7 for peer in mesh.peers(axes, rank)) * x for rank, x in enumerate(blocks)
    ]


def numbered(where, rank):
    """Tokens that are their own numbers, one wide."""
    found = torch.zeros((), dtype=torch.float64)
    for rows, size in zip(where.indices(rank)[:-1], where.shape[:-1], strict=True):
        found = found[..., None] * size + torch.from_numpy(rows).double()
    return found[..., None] + 1


def handed_off(step, text_rows, places):
    """The largest difference of visual rows and of their gradients, and how many messages."""
    merged = [torch.from_numpy(step.layouts.merged.indices(r)[0]) for r in range(len(step.ranks))]
    moves = [at._merged for at in step.ranks]
    rows = [1.0 + own.double()[:, None] for own in merged]
    found, count = carried(step, moves, step.bound.hand_off_axes, rows)
    wanted = [places[own] for own in text_rows]
    wanted = [visual[visual >= 0] for visual in wanted]
    gap = 0.0
    for x, visual in zip(found, wanted, strict=True):
        assert len(x) == len(visual), "a rank has other rows than placeholders"
        gap = max(gap, float((x[:, 0] - visual - 1).abs().max()) if len(x) else 0.0)
    back = [m if m.moves is None else m.__class__(m.moves.reverse, None, 1, 1) for m in moves]
    grads = [torch.ones(len(visual), 1, dtype=torch.float64) for visual in wanted]
    returned, more = carried(step, back, step.bound.hand_off_axes, grads)
    total = torch.zeros(int(step.layouts.merged.shape[0]), dtype=torch.float64)
    for own, x in zip(merged, returned, strict=True):
        total.index_add_(0, own, x[:, 0])
    uses = torch.bincount(torch.cat(wanted).long(), minlength=len(total)).double()
    return max(gap, float((total - uses).abs().max()) if len(total) else 0.0), count + more


def text_places(step):
    """Rows of text of each rank, those of its attention, lengths of segments, and visual tokens.

    These are one for each row, or -1.
    """
    header, pack = step.header, "smp" in step.bound.tokens.text
    tokens = header.table.tokens
    length = step.layouts.tokens.shape[0 if pack else 1]
    lengths = tokens if pack else np.full(len(tokens), length)
    begins = np.cumsum(lengths) - lengths
    rows, read = (
        [(begins[samples] + positions).ravel() for samples, positions in held]
        for held in (
            [(at.share.samples, at.share.positions) for at in step.ranks],
            [
                at.share.entered_tokens or (at.share.samples, at.share.positions)
                for at in step.ranks
            ],
        )
    )
    places, count = np.full(int(lengths.sum()), -1), 0
    for begin, sample in zip(begins, header.samples, strict=True):
        for start, (h, w) in zip(sample.starts, sample.frames, strict=True):
            number = h * w // step.bound.config.unit
            places[begin + start : begin + start + number] = np.arange(count, count + number)
            count += number
    return rows, read, lengths, torch.from_numpy(places)


def simulated(plan, config, world, seed=0):
    """The largest difference from the whole, and the messages of all ranks.

    Raises: AssertionError if a send meets no receive, or ranks disagree.
    """
    step = planned(plan, config, world, seed)
    shares = [at.share for at in step.ranks]
    entered = [s.patches if s.entered_patches is None else s.entered_patches for s in shares]
    rows, read, lengths, places = text_places(step)
    parts = (
        attended(step, "vision", entered, np.array(step.header.segments, np.int64), False),
        attended(step, "text", read, lengths, True),
        handed_off(step, rows, places),
        entered_and_left(step),
        *([dispatched(step, rows, lengths)] if step.ranks[0]._hosts else []),
    )
    return max(gap for gap, _ in parts), sum(count for _, count in parts)


def config_of():
    """Many heads, so that they deal to eight ranks, a width that deals to sixteen, and experts."""
    text = {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 48}
    text["num_experts"] = 512
    return Config.from_dict(tiny_raw(text=text, vision={"num_heads": 8}))


def line(name, plan, config, world, seed):
    """One line of the table; whether all is well."""
    start = time.perf_counter()
    try:
        gap, messages = simulated(plan, config, world, seed)
        fault = "" if gap < FAR else "  FAR OFF"
        told = f"{messages:>9,} messages, off by {gap:.0e}{fault}"
    except AssertionError as error:
        told = fault = f"FAILED: {error}"
    seconds = time.perf_counter() - start
    print(f"{name:44}{world:>6} ranks {told}  {seconds:.1f} s", flush=True)
    return not fault


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", help="file or module of a plan")
    parser.add_argument("--world", type=int, default=512)
    parser.add_argument("--shipped", action="store_true", help="all of plans/")
    parser.add_argument("--drawn", type=int, default=0, help="so many random plans")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config, fine = config_of(), []
    names = [options.plan] if options.plan else []
    if options.shipped:
        files = (*Path("plans").glob("vision_*.py"), *Path("plans").glob("decoder_*.py"))
        names += [*sorted(map(str, files)), "plans/baseline_dp.py"]
    for name in names:
        if not name.endswith("_parallel.py"):
            plan = load_plan(name, options.world)
            fine.append(line(name, plan, config, options.world, 0))
    seed, left = 0, options.drawn
    while left:
        plan, seed = (draw_split_plan if seed % 2 else draw_plan)(seed), seed + 1
        if list(plan.faults(config, plan.mesh.size)):
            continue
        left -= 1
        told = ", ".join(map(str, (*plan.splits.values(), *plan.attention.values())))
        name = f"{seed}: {' | '.join(plan.layouts.values())} {told}"
        fine.append(line(name, plan, config, plan.mesh.size, seed))
    print(f"{sum(fine)} of {len(fine)} plans: every send met its receive, and all was the whole")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
