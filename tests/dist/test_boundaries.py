"""Every boundary crossing of a training step has its declared layout: shapes, and which rows.

A spy stands between the model and the plan's boundaries. At each crossing it looks at the shape
of the model's tensor, and sends a tensor of its own after it whose elements name their global
indices. What is declared is written out here, and worked out by loops over rows.
"""

import re
from collections import Counter
from functools import cached_property

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.config.config import Config
from tests.batches import Builder
from tests.plan_names import WATCHED_PLANS
from tests.tiny import tiny_config
from tests.training import Run
from vlshard import Packing, layout, spec

# How many ranks run a plan, and of those that are not in plans/ patches, tokens and modes.
PLANS = {
    **{name: (world,) for name, world in WATCHED_PLANS.items()},
    "each image cut, ulysses": (
        4,
        "(img@dp.home s@cp) c",
        "b@dp.home s@cp m",
        '"vision": ulysses("cp"), "text": ulysses("cp")',
    ),
    "dealt at home; zigzag, gather": (
        4,
        "(img@dp.home@cp.balance s) c",
        "b@dp.home s@cp.zigzag m",
        '"text": gather("cp")',
    ),
    "packed, gather in flight, gather": (
        4,
        "(img@dp.home s@cp) c",
        "(smp@dp.home s@cp.zigzag) m",
        '"vision": gather("cp", overlap=True), "text": gather("cp", overlap=True)',
    ),
    "packed, ring in flight, ulysses": (
        2,
        "(img@dp.home s)@cp c",
        "(smp@dp.home s)@cp m",
        '"vision": ring("cp", overlap=True), "text": ulysses("cp")',
    ),
}
CUSTOM = """
from vlshard import Mesh, Plan, fsdp, gather, ring, ulysses

def plan(world):
    return Plan(
        mesh=Mesh(dp=world // 2, cp=2),
        params={{"**": fsdp("dp cp")}},
        layouts={{"vision.patches": "{patches}", "text.tokens": "{tokens}"}},
        attention={{{modes}}},
    )
"""
WIDTH = 16  # of the heads of the tiny model
FAR = 40.0  # a query scores its own key far above all others


class Spy:
    """The boundaries of one micro-batch, with a look at everything that crosses them."""

    def __init__(self, bound, header):
        self.bound, self.header, self.inner = bound, header, bound.step(header)
        self.share = self.inner.share
        self.crossings, self.faults = Counter(), []

    def enter(self, inside, x):
        return self.inner.enter(inside, x)

    def leave(self, inside, x):
        return self.inner.leave(inside, x)

    def fetch(self, *args):
        return self.inner.fetch(*args)

    def columns(self, *args):
        return self.inner.columns(*args)

    def merge(self, *args):
        return self.inner.merge(*args)

    def argmax(self, *args):
        return self.inner.argmax(*args)

    def visits(self, *args):
        return self.inner.visits(*args)

    def dispatch(self, *args):
        return self.inner.dispatch(*args)

    def combine(self, *args):
        return self.inner.combine(*args)

    def total(self, *args):
        return self.inner.total(*args)

    def expect(self, what, found, wanted):
        if not np.array_equal(np.asarray(found), np.asarray(wanted)):
            self.faults.append(f"{what}: {np.asarray(found)}, not {np.asarray(wanted)}")

    def layout_of(self, name, axis=None):
        """What is declared for a boundary, before or, with an axis, after heads are dealt."""
        site, role = name.split(".")
        dims = spec(self.bound.config.boundaries[name]).names[2:]
        tokens = str(self.bound.patches if site == "vision" else self.bound.tokens)
        tokens = tokens.rsplit(" ", 1)[0]
        if axis:
            tokens = re.sub(rf"@{axis.split('.')[0]}(\.zigzag)?", "", tokens)
            dims = (f"{dims[0]}@{axis}", *dims[1:])
        sizes = {"img": self.images(role)} if site == "vision" else self.rows
        for dim in dims:
            sizes[dim.split("@")[0]] = self.size_of(site, role, dim.split("@")[0])
        return layout(" ".join((tokens, *dims)), self.bound.mesh, **sizes)

    def size_of(self, site, role, dim):
        config = self.bound.config
        levels = 1 + len(config.vision.deepstack_visual_indexes)
        heads = config.heads[site]
        return {"h": heads.q, "kv": heads.kv, "d": WIDTH, "m": levels * 64}[dim]

    def images(self, role):
        unit = 4
        merged = role == "merged"
        lengths = [n // unit if merged else n for n in self.header.segments]
        home, homes = self.header.segment_home, self.bound.data_ranks
        cost = self.bound.cost
        return Packing(lengths, unit=1 if merged else unit, home=home, homes=homes, cost=cost)

    @property
    def rows(self):
        if self.packed:
            return {"smp": Packing(self.tokens, home=self.header.home)}
        rows = Packing([1] * len(self.header.samples), home=self.header.home)
        return {"b": rows, "s": self.length}

    @property
    def packed(self):
        """Whether samples lie one after another: one row, as the model sees it."""
        return str(self.bound.tokens).startswith("(")

    @property
    def tokens(self):
        return [sample.tokens for sample in self.header.samples]

    @cached_property
    def length(self):
        """Positions of a padded row: the longest sample, up to what deals out evenly."""
        return -(-max(self.tokens) // self.bound.divisor) * self.bound.divisor

    @property
    def rank(self):
        return self.bound.mesh.rank

    def start(self, name, x):
        self.crossings[name] += 1
        dims = spec(self.bound.config.boundaries[name]).dims
        where = self.layout_of(name)
        if len(dims) != x.ndim:
            self.faults.append(f"{name} has {x.ndim} dims, declared are {len(dims)}")
        self.expect(f"{name} shape", x.shape, (*self.lead(name), *where.local_shape(self.rank)))
        numbers = self.batched(name, number(where.indices(self.rank), where.shape))
        self.arrived(name, self.inner.start(name, numbers).wait())
        return self.inner.start(name, x)

    def lead(self, name):
        """What the model has before the declared dims: a pack is one row."""
        return (1,) if self.packed and name.startswith("text") else ()

    def batched(self, name, x):
        return x.reshape(*self.lead(name), *x.shape)

    def arrived(self, name, sent):
        """The elements that came are those that are declared for the other side."""
        site, role = name.split(".")
        where = self.layout_of(name)
        mode = self.bound.attention.get(site)
        held = list(where.indices(self.rank))
        if role == "merged":
            held[0] = self.placeholders()
        elif mode:
            for axis in mode.ways.ulysses:
                peers = self.bound.mesh.peers([axis], self.rank)
                held[-3] = sorted({row for peer in peers for row in where.indices(peer)[-3]})
                held[-2] = self.layout_of(name, axis).indices(self.rank)[-2]
            if mode.ways.gather and role != "q":
                held[-3] = self.needed(site, held[-3])
        wanted = self.batched(name, number(held, where.shape))
        self.expect(f"{name} arrived", sent, wanted)

    def needed(self, site, held):
        """Rows whose keys some queries see: of their whole images, or all up to the last."""
        if site == "text" and not self.packed:
            return np.arange(max(held, default=-1) + 1)
        lengths = self.tokens if site == "text" else self.header.segments
        segment = [i for i, n in enumerate(lengths) for _ in range(n)]
        last = {segment[row]: row for row in sorted(held)}  # of the rows held of each segment
        seen = [
            row
            for row, i in enumerate(segment)
            if i in last and (site == "vision" or row <= last[i])
        ]
        return np.array(seen, np.int64)

    def placeholders(self):
        """Merged rows whose placeholders lie in this rank's tokens, in their order."""
        table, count = {}, 0
        for row, sample in enumerate(self.header.samples):
            for start, (h, w) in zip(sample.starts, sample.frames, strict=True):
                for i in range(h * w // 4):
                    table[row, start + i] = count
                    count += 1
        held = self.layout_of("text.q").indices(self.rank)
        if self.packed:
            pack = [(row, at) for row, n in enumerate(self.tokens) for at in range(n)]
            cells = [pack[token] for token in held[0]]
        else:
            cells = [(int(row), int(at)) for row in held[0] for at in held[1]]
        return np.array([table[cell] for cell in cells if cell in table], np.int64)

    def attend(self, site, q, k, v):
        self.crossings[f"{site}.out"] += 1
        self.attend_to_numbers(site)
        out = self.inner.attend(site, q, k, v)
        shape = self.layout_of(f"{site}.out").local_shape(self.rank)
        self.expect(f"{site}.out shape", out.shape, (*self.lead(site), *shape))
        return out

    def attend_to_numbers(self, site):
        """Each query finds its own key, whose value names its row and head."""
        where = {role: self.layout_of(f"{site}.{role}") for role in ("q", "k", "v", "out")}
        sent = {}
        for role in "kvq":
            held = where[role].indices(self.rank)
            rows = number(held[:-2], where[role].shape[:-2]).long()
            x = codes(int(np.prod(where[role].shape[:-2])))[rows]
            if role == "v":
                x = torch.stack([rows.float(), torch.zeros(rows.shape)], -1)
            x = x.unsqueeze(-2).repeat(*[1] * (x.ndim - 1), len(held[-2]), 1)
            if role == "v":
                x[..., 1] = torch.arange(len(held[-2]))
                x = F.pad(x, (0, WIDTH - 2))
            sent[role] = self.inner.start(f"{site}.{role}", self.batched(site, x))
        out = self.inner.attend(site, sent["q"], sent["k"], sent["v"])
        held = where["out"].indices(self.rank)
        rows = number(held[:-2], where["out"].shape[:-2]).float()
        groups = self.bound.config.heads[site]
        heads = torch.arange(groups.q) // (groups.q // groups.kv)
        wanted = torch.stack(torch.broadcast_tensors(rows.unsqueeze(-1), heads.float()), -1)
        if not torch.allclose(out[..., :2], self.batched(site, wanted), rtol=0, atol=1e-3):
            self.faults.append(f"{site}.out rows: {out[..., :2]}, not {wanted}")


def number(held, shape):
    """Elements that are their own flat global indices, of the product of indices held."""
    flat = torch.zeros([1] * len(held), dtype=torch.float64)
    for i, (indices, size) in enumerate(zip(held, shape, strict=True)):
        along = [-1 if i == j else 1 for j in range(len(held))]
        flat = flat * size + torch.as_tensor(indices, dtype=torch.float64).reshape(along)
    return flat


def codes(count):
    """A direction a row: the rows are told apart by their products."""
    draw = torch.Generator().manual_seed(count)
    return FAR * F.normalize(torch.randn(count, WIDTH, generator=draw), dim=-1)


def crossing_batch(config):
    """Uneven images and texts, in two micro-batches; a video; a row without images."""
    return (
        Builder(config, 21)
        .add(5, (4, 6), 3, (2, 2), 2)
        .add(9)
        .add(1, (3, 2, 4), 2)
        .add(4, (8, 4), 6)
        .batch(micro_batch=1)
    )


def watch(plan, raw):
    run = Run(Config.from_dict(raw), plan, seed=1)
    batch, spies = crossing_batch(run.config), []
    for header in run.headers(batch):
        spies.append(Spy(run.bound, header))
        run.one_forward_backward(batch, header, spies[-1])
    return [dict(spy.crossings) for spy in spies], [fault for spy in spies for fault in spy.faults]


def plan_file(name, tmp_path):
    _, *fields = PLANS[name]
    if not fields:
        return f"plans/{name}.py"
    path = tmp_path / "custom.py"
    path.write_text(CUSTOM.format(**dict(zip(("patches", "tokens", "modes"), fields, strict=True))))
    return str(path)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", PLANS)
def test_every_crossing_of_a_step_has_its_declared_layout(name, ranks, tmp_path):
    raw, config = tiny_config().raw, tiny_config()
    blocks = {"vision": config.vision.depth, "text": config.text.num_hidden_layers}
    once = {f"{site}.{role}": n for site, n in blocks.items() for role in ("q", "k", "v", "out")}
    path = plan_file(name, tmp_path)
    world = PLANS[name][0]
    for steps, faults in ranks(world).run(watch, path, raw, timeout=120):
        assert faults == []
        for crossings in steps:
            visual = "vision.merged" in crossings
            assert crossings == {
                n: c for n, c in {**once, "vision.merged": 1}.items() if visual or "text" in n
            }
        assert any("vision.merged" in crossings for crossings in steps)
