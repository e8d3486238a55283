"""Splits of blocks: still what one process computes, every raw gradient where it is stored."""

from functools import cache

import pytest

from model.config.config import Config
from tests.batches import batches
from tests.plan_names import SPLIT_PLANS
from tests.tiny import tiny_raw
from tests.training import Outcome, Run

SEED = 5
SPREAD = {"initializer_range": 0.08}
TP = {"text.q": "h@tp d", "text.k": "kv@tp d", "text.mlp": "f@tp"}
VISION = {"vision.q": "h@tp d", "vision.mlp": "f@tp"}
KV_PART = {"text.q": "h@tp d", "text.k": "kv@tp.0 d", "text.mlp": "f@tp.1"}
KV_WHOLE = {"text.q": "h@tp d", "text.k": "kv d"}
JOINED = {"text.q": "h@(cp tp) d", "text.k": "kv@cp d", "text.mlp": "f@(tp cp)"}
CUT = "b@dp.home s@cp.zigzag@tp m"
HOME, ALL_CUT = "(img@dp.home s) c", "(img@dp.home s)@cp@tp c"
BOTH_CUT = '{"vision": ulysses("cp tp"), "text": gather("cp")}'

# Per number of ranks: what it is, and mesh, splits, patches, tokens, modes; then other fields.
PLANS = {
    (2, "tokens whole over tp"): ("dp=1, tp=2", TP, "(img@dp.home s)@tp c", "b@dp.home s m",
        '{"vision": gather("tp")}'),
    (2, "tokens cut over tp"): ("dp=1, tp=2", TP, "(img@dp.home@tp.balance s) c",
        "b@dp.home s@tp m", "{}"),
    (2, "packed, cut over tp"): ("dp=1, tp=2", TP, HOME, "(smp@dp.home s)@tp m", "{}"),
    (2, "vision alone, patches whole"): ("dp=1, tp=2", VISION, HOME, "b@dp.home s@tp.zigzag m",
        '{"text": gather("tp")}'),
    (2, "vision and text, both cut"): ("dp=1, tp=2", TP | VISION, "(img@dp.home s)@tp c",
        "b@dp.home s@tp m", "{}"),
    (4, "tp2 cp2, gather"): ("dp=1, cp=2, tp=2", TP, ALL_CUT, CUT, BOTH_CUT),
    (4, "tp2 cp2, ulysses, tokens whole"): ("dp=1, cp=2, tp=2", TP, HOME,
        "b@dp.home s@cp.zigzag m", '{"text": ulysses("cp")}'),
    (4, "tp2 cp2, ring in flight, packed, recomputed"): ("dp=1, cp=2, tp=2", TP, HOME,
        "(smp@dp.home s@cp.zigzag)@tp m", '{"text": ring("cp", overlap=True)}',
        {"checkpoint": {"text": 1, "vision": 2}}),
    (4, "tp2 dp2, fsdp over dp"): ("dp=2, tp=2", TP | VISION, HOME, "b@dp.home s@tp m", "{}",
        {"params": '{"**": fsdp("dp")}'}),
    (4, "tp2 dp2, sharded over tp, copied over dp"): ("dp=2, tp=2", TP, HOME, "b@dp.home s m", "{}",
        {"params": '{"**": fsdp(shard="tp", replicate="dp")}'}),
    (4, "tp2 dp2, replicated"): ("dp=2, tp=2", TP | VISION, HOME, "b@dp.home s@tp m", "{}",
        {"params": '{"**": replicate()}'}),
    (4, "tp4, 2 key heads"): ("dp=1, tp=(2, 2)", KV_PART, HOME, "b@dp.home s@tp.0@tp.1 m", "{}"),
    (4, "tp4, 1 key head"): ("dp=1, tp=4", KV_WHOLE | {"text.mlp": "f@tp"}, HOME, "b@dp.home s@tp m",
        "{}"),
    (4, "two axes, joined"): ("dp=1, cp=2, tp=2", JOINED, HOME, "b@dp.home s@cp@tp m", "{}"),
}
QUICK = [key for key in PLANS if "replicated" not in key[1]]
CASES = ("mixed sizes", "images on the first rank only", "text only", "lengths 1 2 7 13 17")
ALL_CASES = (*CASES, "one sample, one image", "one-token images", "video and image")
TEMPLATE = """
from vlshard import Mesh, Plan, fsdp, gather, hybrid, replicate, ring, ulysses

def plan(world):
    mesh = Mesh({mesh})
    return Plan(
        mesh=mesh,
        params={params},
        layouts={{"vision.patches": "{patches}", "text.tokens": "{tokens}"}},
        splits={splits},
        attention={modes},
        checkpoint={checkpoint},
        regather={regather},
    )
"""


def raw(key_heads: int = 2) -> dict:
    """Four heads each, biases, two of four layers dense, and an MLP that 4 ranks cut unevenly."""
    text = {
        **SPREAD,
        "mlp_only_layers": [1, 3],
        "attention_bias": True,
        "num_key_value_heads": key_heads,
        "intermediate_size": 42,
    }
    return tiny_raw(text=text, vision={**SPREAD, "num_heads": 4})


def probe_all(plan, raw, cases, expected=None) -> dict[str, Outcome]:
    config, known = Config.from_dict(raw), expected or {}
    run, made = Run(config, plan, seed=SEED), batches(config)
    return {name: run.probe(made[name], known.get(name)) for name in cases}


@cache
def reference(key_heads: int, cases: tuple[str, ...]) -> dict[str, Outcome]:
    return probe_all(None, raw(key_heads), cases)


def write_plan(path, key) -> str:
    return write_plan_of(path, *PLANS[key])


def write_plan_of(path, mesh, splits, patches, tokens, modes, *more) -> str:
    fields = {"params": '{"**": fsdp(" ".join(mesh.sizes))}', "checkpoint": {}, "regather": ()}
    for other in more:
        fields |= other
    fields |= {"mesh": mesh, "splits": splits, "patches": patches, "tokens": tokens}
    path.write_text(TEMPLATE.format(**fields, modes=modes))
    return str(path)


def pytest_generate_tests(metafunc):
    """Every plan on every kind of batch with ``--all-pairs``, else the quick ones."""
    thorough = metafunc.config.getoption("all_pairs")
    if "plan" in metafunc.fixturenames:
        chosen = list(PLANS) if thorough else QUICK
        metafunc.parametrize("plan", chosen, ids=lambda key: f"{key[0]}-{key[1]}")
    if "cases" in metafunc.fixturenames:
        metafunc.parametrize("cases", [ALL_CASES if thorough else CASES], ids=["cases"])


def test_split_equals_one_process(plan, cases, ranks, tmp_path):
    path = write_plan(tmp_path / "split.py", plan)
    key_heads = 1 if "1 key head" in plan[1] else 2
    compare(ranks, plan[0], path, key_heads, cases)


@pytest.mark.parametrize("name", SPLIT_PLANS)
def test_shipped_plan_equals_one_process(name, cases, ranks):
    compare(ranks, SPLIT_PLANS[name], f"plans/{name}.py", 2, cases)


def compare(ranks, world, path, key_heads, cases):
    """Loss, norm and every raw gradient of each kind of batch."""
    expected = reference(key_heads, cases)
    found = ranks(world).run(probe_all, path, raw(key_heads), cases, expected, timeout=180)[0]
    for name, right in expected.items():
        assert found[name].faults == [], name
        assert found[name].loss == pytest.approx(right.loss, rel=1e-6), name
        assert found[name].norm == pytest.approx(right.norm, rel=1e-5), name
