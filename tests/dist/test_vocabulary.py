"""A vocabulary that ranks share: still what one process computes, every raw gradient."""

from functools import cache

import pytest

from model.config.config import Config
from tests.batches import batches
from tests.dist.test_splits import SPREAD
from tests.tiny import tiny_raw
from tests.training import Outcome, Run

SEED = 7
TP = {"text.q": "h@tp d", "text.k": "kv@tp d", "text.mlp": "f@tp"}
HOME = "(img@dp.home s) c"

# Per number of ranks: what it is, and mesh, splits, tokens; then other fields.
PLANS = {
    (2, "tp, tokens whole"): ("dp=1, tp=2", {"text.vocab": "vocab@tp"}, "b@dp.home s m"),
    (2, "tp, tokens cut"): ("dp=1, tp=2", TP | {"text.vocab": "vocab@tp"}, "b@dp.home s@tp m"),
    (2, "dp, copies beside"): ("dp=2", {"text.vocab": "vocab@dp"}, "b@dp.home s m",
        {"params": '{"**": replicate()}'}),
    (2, "dp, packed, recomputed"): ("dp=2", {"text.vocab": "vocab@dp"}, "(smp@dp.home s) m",
        {"checkpoint": {"text": 1}}),
    (4, "dp and cp"): ("dp=2, cp=2", {"text.vocab": "vocab@(dp cp)"}, "b@dp.home s@cp.zigzag m",
        {"attention": '{"text": gather("cp")}'}),
    (4, "dp and tp, tokens whole over tp"): ("dp=2, tp=2",
        TP | {"text.vocab": "vocab@(tp dp)"}, "b@dp.home s m"),
    (4, "dp inside tp, tokens cut"): ("dp=2, tp=2",
        TP | {"text.vocab": "vocab@tp@dp"}, "b@dp.home s@tp m"),
    (4, "tp beside fsdp over dp"): ("dp=2, tp=2", {"text.vocab": "vocab@tp"}, "b@dp.home s m"),
    (4, "cp, whole over dp, packed"): ("dp=2, cp=2", {"text.vocab": "vocab@cp"},
        "(smp@dp.home s)@cp m", {"attention": '{"text": ring("cp")}'}),
}
CASES = ("mixed sizes", "text only", "lengths 1 2 7 13 17", "labels on one rank only")
ALL_CASES = (*CASES, "images on the first rank only", "one sample, one image", "no label at all",
    "micro-batches, uneven", "video and image")

TEMPLATE = """
from vlshard import Mesh, Plan, fsdp, gather, replicate, ring

def plan(world):
    mesh = Mesh({mesh})
    return Plan(
        mesh=mesh,
        params={params},
        layouts={{"vision.patches": "{patches}", "text.tokens": "{tokens}"}},
        splits={splits},
        attention={attention},
        checkpoint={checkpoint},
    )
"""


def raw(*, tied: bool = False) -> dict:
    """An odd vocabulary, a real token that is the padding token, two of four layers dense."""
    text = {**SPREAD, "vocab_size": 97, "mlp_only_layers": [1, 3], "pad_token_id": 20}
    return tiny_raw(text=text, vision=SPREAD, tie_word_embeddings=tied)


def write_plan(path, key) -> str:
    mesh, splits, tokens, *more = PLANS[key]
    fields = {"params": '{"**": fsdp(" ".join(mesh.sizes))}', "checkpoint": {}, "attention": "{}"}
    for other in more:
        fields |= other
    fields |= {"mesh": mesh, "splits": splits, "patches": HOME, "tokens": tokens}
    path.write_text(TEMPLATE.format(**fields))
    return str(path)


def probe_all(plan, raw, cases, expected=None) -> dict[str, Outcome]:
    config, known = Config.from_dict(raw), expected or {}
    run, made = Run(config, plan, seed=SEED), batches(config)
    return {name: run.probe(made[name], known.get(name)) for name in cases}


@cache
def reference(tied: bool, cases: tuple[str, ...]) -> dict[str, Outcome]:
    return probe_all(None, raw(tied=tied), cases)


def pytest_generate_tests(metafunc):
    """Every plan on every kind of batch, tied and untied, with ``--all-pairs``."""
    thorough = metafunc.config.getoption("all_pairs")
    if "plan" in metafunc.fixturenames:
        ties = [(False, True)] * len(PLANS) if thorough else [(i % 2 == 1,) for i, _ in enumerate(PLANS)]
        chosen = [(key, tied) for key, some in zip(PLANS, ties, strict=True) for tied in some]
        names = [f"{key[0]}-{key[1]}-{'tied' if tied else 'untied'}" for key, tied in chosen]
        metafunc.parametrize(("plan", "tied"), chosen, ids=names)
    if "cases" in metafunc.fixturenames:
        metafunc.parametrize("cases", [ALL_CASES if thorough else CASES], ids=["cases"])


def test_shared_vocabulary_equals_one_process(plan, tied, cases, ranks, tmp_path):
    path = write_plan(tmp_path / "vocab.py", plan)
    compare(ranks, plan[0], path, tied, cases)


def compare(ranks, world, path, tied, cases):
    """Loss, norm and every raw gradient of each kind of batch."""
    expected = reference(tied, cases)
    found = ranks(world).run(probe_all, path, raw(tied=tied), cases, expected, timeout=180)[0]
    for name, right in expected.items():
        assert found[name].faults == [], name
        assert found[name].loss == pytest.approx(right.loss, rel=1e-6), name
        assert found[name].norm == pytest.approx(right.norm, rel=1e-5), name
