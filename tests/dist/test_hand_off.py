"""Visual rows reach exactly the ranks that hold their placeholders, once, and nothing else moves.

The sample is three text tokens, a 4x6 image (6 visual tokens, at 4-9) and text, padded to 16.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from model.config.config import Config
from model.data.inputs import build_inputs
from model.data.sample import sample_facts
from model.text import add_visual, place_visual
from plans.decoder_parallel import tensor_parallel
from tests.batches import Builder, batches
from tests.plan_names import CUT_IMAGE_PLANS
from tests.tiny import tiny_config
from tests.training import Run
from vlshard import Mesh, Plan, gather, replicate
from vlshard.comm import transport
from vlshard.plan.header import make_headers

WIDTH = 64
LEVELS = 3


def make_plan(tokens: str, patches: str = "(img@dp.home s)@cp c", cp: int = 2) -> Plan:
    """Tokens and patches cut over cp, with attention to match, or over tp, which splits blocks."""
    if "@tp" in tokens:
        return Plan(
            mesh=Mesh(dp=1, tp=cp if cp == 2 else (2, cp // 2)),
            params={"**": replicate()},
            layouts={"vision.patches": "(img@dp.home@tp.balance s) c", "text.tokens": tokens},
            splits=tensor_parallel("tp", kv=None if cp == 2 else "tp.0"),
        )
    return Plan(
        mesh=Mesh(dp=1, cp=cp),
        params={"**": replicate()},
        layouts={"vision.patches": patches, "text.tokens": tokens},
        attention={
            **({"vision": gather("cp")} if "@cp" in patches else {}),
            **({"text": gather("cp")} if "@cp" in tokens else {}),
        },
    )


def sample(config):
    return Builder(config, 1).add(3, (4, 6), 4).batch()


def bound_step(plan: Plan, config: Config, batch):
    facts = [sample_facts(s, i, config) for i, s in enumerate(batch.samples)]
    bound = plan.bind(config, plan.mesh.size)
    header = make_headers(facts, bound.data_ranks)[0]
    return bound.step(header)


def stub_rows(indices) -> torch.Tensor:
    """Row j of level l holds 100 * l + j everywhere; level 0 is the merged token."""
    j = torch.as_tensor(indices, dtype=torch.float32)
    return torch.cat(
        [(100.0 * level + j)[:, None].expand(-1, WIDTH) for level in range(LEVELS + 1)], 1
    )


def placed(tokens: str, cp: int, raw):
    """Embeddings with visual rows in place, then each DeepStack level added: [positions, ...]."""
    config = Config.from_dict(raw)
    at = bound_step(make_plan(tokens, cp=cp), config, sample(config))
    unit = config.unit
    mine = at.share.patches[::unit] // unit
    rows = at.start("vision.merged", stub_rows(mine)).wait()
    (positions,) = at.share.positions
    visual = torch.tensor([i for i, p in enumerate(positions) if 4 <= p < 10], dtype=torch.int64)
    base = torch.as_tensor(positions, dtype=torch.float32)[None, :, None] / 7
    embeds = base.expand(1, -1, WIDTH)
    merged, *levels = rows.split(WIDTH, -1)
    steps = [place_visual(embeds, merged, visual)]
    for level in levels:
        steps.append(add_visual(steps[-1], level, visual))
    return positions.tolist(), merged[:, 0].tolist(), torch.stack(steps)[:, 0, :, 0]


# Rows per rank, by hand: the placeholder at position p holds visual row p - 4.
ROWS = {
    ("b@dp.home s@cp m", 2): [[0, 1, 2, 3], [4, 5]],
    ("b@dp.home s@cp.zigzag m", 2): [[], [0, 1, 2, 3, 4, 5]],
    ("b@dp.home s@cp m", 4): [[], [0, 1, 2, 3], [4, 5], []],
    ("b@dp.home s@cp.zigzag m", 4): [[], [], [0, 1], [2, 3, 4, 5]],
    ("b@dp.home s@tp m", 2): [[0, 1, 2, 3], [4, 5]],
    ("b@dp.home s@tp m", 4): [[], [0, 1, 2, 3], [4, 5], []],
}


@pytest.mark.parametrize(("tokens", "cp"), ROWS)
def test_each_rank_gets_the_rows_of_its_placeholders(tokens, cp, ranks):
    results = ranks(cp).run(placed, tokens, cp, tiny_config().raw)
    assert [rows for _, rows, _ in results] == ROWS[tokens, cp]
    whole = torch.arange(16.0) / 7
    whole[4:10] = torch.arange(6.0)
    expected = [whole]
    for level in range(1, LEVELS + 1):
        added = expected[-1].clone()
        added[4:10] += 100.0 * level + torch.arange(6.0)
        expected.append(added)
    for positions, _, found in results:
        assert torch.equal(found, torch.stack(expected)[:, positions])


def several(config):
    """An image; two images side by side; a video of three frames and an image; text alone."""
    parts = Builder(config, 4).add(3, (4, 6), 2).add(1, (4, 4), (2, 6), 1)
    return parts.add(2, (3, 4, 4), 2, (2, 2), 1).add(7).batch()


def added(tokens: str, cp: int, raw):
    """Sample and position of each token of this rank, and its states after each DeepStack level."""
    config = Config.from_dict(raw)
    batch = several(config)
    at = bound_step(make_plan(tokens, cp=cp), config, batch)
    facts = [sample_facts(s, i, config) for i, s in enumerate(batch.samples)]
    samples, header = dict(enumerate(batch.samples)), make_headers(facts, 1)[0]
    visual = build_inputs(header, at.share, samples, batch.pixels, config).text.visual
    mine = at.share.patches[:: config.unit] // config.unit
    merged, *levels = at.start("vision.merged", stub_rows(mine)).wait().split(WIDTH, -1)
    base = torch.as_tensor(1000 * at.share.samples + at.share.positions, dtype=torch.float32) / 7
    steps = [place_visual(base[..., None].expand(-1, -1, WIDTH), merged, visual)]
    for level in levels:
        steps.append(add_visual(steps[-1], level, visual))
    return at.share.samples, at.share.positions, torch.stack(steps, -1)[..., 0, :]


def states(config, batch):
    """By sample and position, the states after each level: walked through in reading order."""
    found, count = {}, 0
    for index, row in enumerate(batch.samples):
        for place in range(40):
            steps = torch.full((1 + LEVELS,), float(1000 * index + place)) / 7
            token = row.ids[place] if place < len(row.ids) else None
            if token in (config.image_token_id, config.video_token_id):
                terms = [count, *(100 * level + count for level in range(1, 1 + LEVELS))]
                steps = torch.tensor(terms, dtype=torch.float32).cumsum(0)
                count += 1
            found[index, place] = steps
    return found


CUTS = [
    ("b@dp.home s@cp m", 2),
    ("b@dp.home s@cp.zigzag m", 2),
    ("b@dp.home s@cp.zigzag m", 4),
    ("(smp@dp.home s@cp) m", 2),
    ("(smp@dp.home s@cp.zigzag) m", 2),
    ("(smp@dp.home s@cp.zigzag) m", 4),
    ("(smp@dp.home s)@cp m", 4),
    ("b@dp.home s@tp m", 2),
    ("(smp@dp.home s)@tp m", 4),
]


@pytest.mark.parametrize(("tokens", "cp"), CUTS)
def test_deepstack_adds_each_row_where_its_placeholder_is(tokens, cp, ranks):
    config = tiny_config()
    expected = states(config, several(config))
    results = ranks(cp).run(added, tokens, cp, config.raw)
    count = 0
    for samples, positions, found in results:
        places = zip(samples.ravel().tolist(), positions.ravel().tolist(), strict=True)
        for place, steps in zip(places, found.flatten(0, 1), strict=True):
            assert torch.equal(steps, expected[place])
            count += 1
    lengths = [len(row.ids) for row in several(config).samples]
    assert count == (sum(lengths) if "smp" in tokens else 4 * 32)


class Recorder:
    """Every collective of activations, parameters and facts, by name."""

    def __init__(self):
        self.messages = []
        self.calls = []

    def __enter__(self):
        self._launch, transport.launch = transport.launch, self.launch
        self._gather, dist.all_gather = dist.all_gather, self.named("all_gather", dist.all_gather)
        return self

    def __exit__(self, *_):
        transport.launch, dist.all_gather = self._launch, self._gather

    def named(self, name, function):
        def call(*args, **kwargs):
            self.calls.append(name)
            return function(*args, **kwargs)

        return call

    def launch(self, outgoing, shapes, group):
        me = group.rank()
        sent = sum(x.numel() * x.element_size() for k, x in outgoing.items() if k != me)
        self.messages.append(sent)
        return self._launch(outgoing, shapes, group)


def hand_off_bytes(tokens: str, patches: str, raw, case: str):
    """Bytes that the hand-off sends, forward and backward, and what each rank holds and wants."""
    config = Config.from_dict(raw)
    batch = batches(config)[case]
    at = bound_step(make_plan(tokens, patches), config, batch)
    mine = at.share.patches[:: config.unit] // config.unit
    x = stub_rows(mine).requires_grad_()
    with Recorder() as recorder:
        rows = at.start("vision.merged", x).wait()
        forward = sum(recorder.messages)
        (rows * (1 + torch.arange(len(rows)))[:, None]).sum().backward()
    wanted = [int(j) for j in rows[:, 0]]
    return mine.tolist(), wanted, forward, sum(recorder.messages) - forward, x.grad[:, 0]


@pytest.mark.parametrize("case", ["mixed sizes", "one-token images", "video and image"])
@pytest.mark.parametrize("patches", ["(img@dp.home s)@cp c", "(img@dp.home@cp s) c"])
@pytest.mark.parametrize(
    "tokens", ["b@dp.home s@cp.zigzag m", "b@dp.home s m", "(smp@dp.home s@cp.zigzag) m"]
)
def test_hand_off_sends_the_lower_bound(tokens, patches, case, ranks):
    results = ranks(2).run(hand_off_bytes, tokens, patches, tiny_config().raw, case)
    row = 4 * WIDTH * (1 + LEVELS)
    held = [set(mine) for mine, *_ in results]
    wanted = [set(rows) for _, rows, *_ in results]
    total = {}
    for _, rows, *_ in results:
        for place, j in enumerate(rows):
            total[j] = total.get(j, 0) + place + 1
    for me, (mine, _, forward, backward, grad) in enumerate(results):
        other = 1 - me
        assert forward == row * len(wanted[other] - held[other])
        assert backward == row * len(wanted[me] - held[me])
        assert grad.tolist() == [total.get(j, 0) for j in mine]


def step_collectives(plan: str, raw):
    run = Run(Config.from_dict(raw), plan, seed=1)
    batch = batches(run.config)["mixed sizes"]
    run.model.zero_grad(set_to_none=True)
    header = run.headers(batch)[0]
    at = run.bound.step(header)
    names = []
    start = at.start
    at.start = lambda name, x: (names.append((name, tuple(x.shape))), start(name, x))[1]
    with Recorder() as recorder:
        run.one_forward_backward(batch, header, at)
    return recorder.calls, len(recorder.messages), names


@pytest.mark.parametrize("plan", CUT_IMAGE_PLANS)
def test_a_step_gathers_nothing_but_parameters(plan, ranks):
    for calls, messages, names in ranks(2).run(
        step_collectives, f"plans/{plan}.py", tiny_config().raw
    ):
        assert calls == []
        crossed = {name for name, _ in names}
        sites = {f"{site}.{role}" for site in ("vision", "text") for role in "qkv"}
        assert crossed == sites | {"vision.merged"}
        layers, blocks = 4, 3
        attention = 2 * blocks + 2 * layers if "colossal" in plan else 4 * blocks + 2 * layers
        assert messages == 2 * (attention + 1)  # each once forward and once backward


def test_visual_tokens_are_numbered_in_reading_order():
    config = tiny_config()
    plan = Plan(
        mesh=Mesh(dp=1),
        params={"**": replicate()},
        layouts={"vision.patches": "(img@dp.home s) c", "text.tokens": "b@dp.home s m"},
    )
    batch = Builder(config, 2).add(2, (2, 4), 1, (2, 2)).add(1, (2, 6)).batch()
    at = bound_step(plan, config, batch)
    rows = at.start("vision.merged", stub_rows(np.arange(6))).wait()
    assert rows[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
