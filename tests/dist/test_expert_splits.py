"""Experts over ranks: still what one process computes, whatever else is split or frozen."""

import pytest

from model.config.config import Config
from tests.batches import batches
from tests.dist.test_splits import CUT, HOME, SEED, TEMPLATE, TP, compare, raw
from tests.training import Run
from vlshard.storage import local_part

ROWS, WHOLE, CP = "b@dp.home s m", "b@dp.home s m", "b@dp.home s@cp.zigzag m"
OVER_DP, OVER_TP = {"text.experts": "e@dp f"}, {"text.experts": "e@tp f"}
FOLDED = {"text.experts": "e@(cp tp) f"}
GATHER = '{"text": gather("cp")}'

# Per number of ranks: what it is, and mesh, splits, tokens, modes; then other fields of the plan,
# and of the run: how many experts there are and a token has, what is frozen, and whether routers
# are flat: of weights 0, so that all tokens go to the same experts.
PLANS = {
    (2, "over ranks with rows of their own"): ("dp=2", OVER_DP, ROWS, "{}"),
    (2, "columns of each"): ("dp=2", {"text.experts": "e f@dp"}, ROWS, "{}"),
    (2, "where tokens are whole"): ("dp=1, tp=2", OVER_TP, WHOLE, "{}"),
    (2, "columns of each, where tokens are whole"): (
        "dp=1, tp=2",
        {"text.experts": "e f@tp"},
        WHOLE,
        "{}",
    ),
    (2, "of cut tokens, with attention, recomputed"): (
        "dp=1, tp=2",
        TP | OVER_TP,
        "b@dp.home s@tp m",
        "{}",
        {"checkpoint": {"text": 1}},
    ),
    (2, "six, all tokens to the same"): ("dp=2", OVER_DP, ROWS, "{}", {"experts": 6, "flat": True}),
    (2, "four, one a token, all to one"): (
        "dp=2",
        OVER_DP,
        ROWS,
        "{}",
        {"experts": 4, "top": 1, "flat": True},
    ),
    (2, "all but experts frozen"): (
        "dp=2",
        OVER_DP,
        ROWS,
        "{}",
        {"freeze": ("model.visual", "lm_head", "model.language_model.embed")},
    ),
    (2, "routers alone are trained"): ("dp=2", OVER_DP, ROWS, "{}", {"freeze": "routers alone"}),
    (4, "over all, zigzag"): ("dp=2, cp=2", {"text.experts": "e@(dp cp) f"}, CP, GATHER),
    (4, "four over four, the other way round"): (
        "dp=2, cp=2",
        {"text.experts": "e@(cp dp) f"},
        CP,
        GATHER,
        {"experts": 4},
    ),
    (4, "over cp, copied over dp"): ("dp=2, cp=2", {"text.experts": "e@cp f"}, CP, GATHER),
    (4, "over cp and tp, with attention"): ("dp=1, cp=2, tp=2", TP | FOLDED, CUT, GATHER),
    (4, "over cp and tp, tokens whole over tp"): ("dp=1, cp=2, tp=2", TP | FOLDED, CP, GATHER),
    (4, "numbers and columns, packed"): (
        "dp=2, tp=2",
        {"text.experts": "e@dp f@tp"},
        "(smp@dp.home s)@tp m",
        "{}",
        {"modes": '{"text": gather("tp")}'},
    ),
    (4, "columns over rows, numbers where tokens are whole"): (
        "dp=2, tp=2",
        {"text.experts": "e@tp f@dp"},
        WHOLE,
        "{}",
    ),
    (4, "sharded over tp, copied over dp"): (
        "dp=2, tp=2",
        OVER_TP,
        "b@dp.home s@tp m",
        "{}",
        {"params": '{"**": fsdp(shard="tp", replicate="dp")}', "modes": '{"text": gather("tp")}'},
    ),
    (4, "replicated"): (
        "dp=2, tp=2",
        TP | OVER_DP,
        "b@dp.home s@tp m",
        "{}",
        {"params": '{"**": replicate()}'},
    ),
}
QUICK = [
    (2, "of cut tokens, with attention, recomputed"),
    (2, "four, one a token, all to one"),
    (2, "routers alone are trained"),
    (4, "over cp and tp, tokens whole over tp"),
    (4, "numbers and columns, packed"),
]
CASES = ("micro-batches, uneven", "one sample, one image")
ALL_CASES = (*CASES, "mixed sizes", "lengths 1 2 7 13 17", "text only", "no label at all", "images on the last rank only")
KNOWN = {}
OF_RUNS = ("experts", "top", "flat", "freeze")


def model_of(key) -> dict:
    """The config: two of four layers have experts."""
    more = options_of(key)
    made = raw()
    made["text_config"] |= {
        "num_experts": more.get("experts", 8),
        "num_experts_per_tok": more.get("top", 2),
    }
    return made


def options_of(key) -> dict:
    return PLANS[key][4] if len(PLANS[key]) > 4 else {}


def write_plan(path, key) -> str:
    mesh, splits, tokens, modes, *_ = PLANS[key]
    fields = {"params": '{"**": fsdp(" ".join(mesh.sizes))}', "modes": modes}
    fields |= {"checkpoint": {}, "regather": ()}
    fields |= {name: text for name, text in options_of(key).items() if name not in OF_RUNS}
    fields |= {"mesh": mesh, "splits": splits, "patches": HOME, "tokens": tokens}
    path.write_text(TEMPLATE.format(**fields))
    return str(path)


def frozen(config: Config, which) -> tuple[str, ...]:
    names = config.parameter_shapes()
    return which if which != "routers alone" else [n for n in names if "mlp.gate." not in n]


def flatten_routers(model) -> None:
    """All experts are equally probable for every token."""
    for name, parameter in model.named_parameters():
        if "mlp.gate.weight" in name:
            local_part(parameter.detach()).zero_()


def probe_all(plan, made, options, cases, expected=None):
    config, known = Config.from_dict(made), expected or {}
    run = Run(config, plan, seed=SEED, freeze=frozen(config, options.get("freeze", ())))
    if options.get("flat"):
        flatten_routers(run.model)
    drawn = batches(config)
    return {name: run.probe(drawn[name], known.get(name)) for name in cases}


def reference(key, cases):
    """One process; computed once for all plans of one model and run."""
    options = {name: value for name, value in options_of(key).items() if name in OF_RUNS}
    what = str((options, cases))
    if what not in KNOWN:
        KNOWN[what] = probe_all(None, model_of(key), options, cases)
    return KNOWN[what]


def pytest_generate_tests(metafunc):
    """Every plan on more kinds of batches, and eight ranks, with ``--all-pairs``."""
    thorough = metafunc.config.getoption("all_pairs")
    if "cases" in metafunc.fixturenames:
        metafunc.parametrize("cases", [ALL_CASES if thorough else CASES], ids=["cases"])
    if "key" in metafunc.fixturenames:
        chosen = list(PLANS) if thorough else QUICK
        metafunc.parametrize("key", chosen, ids=lambda key: f"{key[0]}-{key[1]}")
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("world", [8 if thorough else 4])


def test_all_at_once_equals_one_process(world, ranks):
    compare(ranks, world, "plans/decoder_all.py", 2, ("micro-batches, uneven",))


def test_experts_over_ranks_equal_one_process(key, cases, ranks, tmp_path):
    expected = reference(key, cases)
    path = write_plan(tmp_path / "plan.py", key)
    given = path, model_of(key), options_of(key), cases, expected
    found = ranks(key[0]).run(probe_all, *given, timeout=180)[0]
    for name, right in expected.items():
        assert found[name].faults == [], name
        assert found[name].loss == pytest.approx(right.loss, rel=1e-6), name
        assert found[name].norm == pytest.approx(right.norm, rel=1e-5), name
