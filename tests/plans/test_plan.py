"""Plans are checked whole, before anything is allocated, and all their faults are told at once."""

from pathlib import Path

import numpy as np
import pytest

from model.config.config import Config
from tests.plan_names import (
    EVERY_RANK_READS,
    FOUR_RANKS_ONLY,
    MAIN_PLANS,
    OTHER_PLANS,
    SPLIT_PLANS,
)
from tests.tiny import tiny_config, tiny_raw
from vlshard import Mesh, Plan, PlanError, fsdp, gather, hybrid, replicate, ring, ulysses
from vlshard.plan.header import SampleFacts, make_headers
from vlshard.plan.model_config import SITES
from vlshard.plan.plan import load_plan
from vlshard.storage.declared import Storage

PATCHES = "(img@dp.home s)@cp c"
TOKENS = "b@dp.home s@cp.zigzag m"


def make(patches=PATCHES, tokens=TOKENS, **changes) -> Plan:
    """A plan for four ranks in which only the given fields differ."""
    fields = {
        "mesh": Mesh(dp=2, cp=2),
        "params": {"model.visual.**": replicate(), "**": fsdp("dp cp")},
        "layouts": {"vision.patches": patches, "text.tokens": tokens},
        "attention": {"vision": ulysses("cp"), "text": gather("cp")},
    }
    return Plan(**{**fields, **changes})


def fault(plan: Plan, world: int = 4, config: Config | None = None) -> str:
    with pytest.raises(PlanError) as error:
        plan.bind(config or tiny_config(), world)
    return str(error.value)


def test_all_faults_are_told_at_once():
    plan = make(
        patches="(img@dp.home s)@xp c",
        params={"**": fsdp("dp xp")},
        attention={"vision": ring("xp")},
    )
    assert fault(plan, world=8) == (
        "4 faults in plan\n"
        "  mesh dp=2 cp=2 has 4 ranks, the world has 8\n"
        "    plan mesh\n"
        "    fix: start 4 ranks, or a mesh whose sizes multiply to 8\n"
        "  unknown mesh axis 'xp' in fsdp('dp xp')\n"
        "    plan params '**'\n"
        "    mesh: dp=2 cp=2; did you mean 'cp' or 'dp'?\n"
        "  unknown mesh axis 'xp' in attention\n"
        "    plan attention 'vision'\n"
        "    mesh: dp=2 cp=2; did you mean 'cp' or 'dp'?\n"
        "  unknown mesh axis 'xp'\n"
        "    plan vision.patches: (img@dp.home s)@xp c\n"
        "                                         ^^\n"
        "    mesh: dp=2 cp=2; did you mean 'cp' or 'dp'?"
    )


def test_heads_that_cannot_be_dealt_name_the_degrees_that_work():
    plan = make(mesh=Mesh(dp=1, cp=3))
    assert fault(plan, world=3) == (
        "2 heads cannot be dealt to cp=3\n"
        "  plan vision.patches (vision.q): (img@dp.home s)@cp h d -> (img@dp.home s) h@cp d\n"
        "                                                                            ^^^^\n"
        "  fix: degrees 1, 2 work; or gather('cp') or ring('cp')"
    )


def test_heads_of_a_hybrid_name_the_degrees_that_work():
    mesh = Mesh(dp=1, cp={"ring": 2, "ulysses": 4})
    mode = hybrid(ulysses="cp.ulysses", ring="cp.ring", overlap=True)
    plan = make(mesh=mesh, attention={"vision": mode, "text": gather("cp")})
    assert fault(plan, world=8) == (
        "2 heads cannot be dealt to cp.ulysses=4\n"
        "  plan vision.patches (vision.q): "
        "(img@dp.home s)@cp h d -> (img@dp.home s)@cp.ring h@cp.ulysses d\n"
        "                                                                                    "
        "^^^^^^^^^^^^\n"
        "  fix: degrees 1, 2 work; or gather('cp') or ring('cp')"
    )


def test_a_cut_that_a_mode_leaves_is_shown():
    mesh = Mesh(dp=1, cp=(2, 2))
    plan = make(mesh=mesh, attention={"vision": ring("cp.0"), "text": gather("cp")})
    assert fault(plan) == (
        "segments are cut over 'cp.1', and no attention mode brings their keys together\n"
        "  plan vision.patches: (img@dp.home s)@cp c\n"
        "                                      ^^^\n"
        '  fix: attention={"vision": gather("cp")} or ulysses("cp")'
    )


def test_the_mode_offered_works_over_no_axis_that_cuts_nothing():
    plan = make(attention={"vision": ring("dp"), "text": gather("cp")})
    assert '  fix: attention={"vision": gather("cp")} or ulysses("cp")' in fault(plan)


def test_a_cut_without_a_mode_is_shown():
    assert fault(make(attention={"vision": ulysses("cp")})) == (
        "segments are cut over 'cp', and no attention mode brings their keys together\n"
        "  plan text.tokens: b@dp.home s@cp.zigzag m\n"
        "                               ^^^\n"
        '  fix: attention={"text": gather("cp")} or ulysses("cp")'
    )


def test_dims_that_a_boundary_does_not_have_are_pointed_at():
    assert fault(make(patches="(image@dp.home s)@cp c")) == (
        "boundary 'vision.patches' has dims '(img s) c'\n"
        "  plan vision.patches: (image@dp.home s)@cp c\n"
        "                        ^^^^^\n"
        "  'image' is none of them"
    )
    assert fault(make(tokens="b@dp.home sq@cp.zigzag m")) == (
        "boundary 'text.tokens' has dims 'b s m' or '(smp s) m'\n"
        "  plan text.tokens: b@dp.home sq@cp.zigzag m\n"
        "                              ^^\n"
        "  'sq' is none of them; did you mean 's'?"
    )
    assert fault(make(tokens="s@cp.zigzag b@dp.home m")) == (
        "boundary 'text.tokens' has dims 'b s m' or '(smp s) m'\n"
        "  plan text.tokens: s@cp.zigzag b@dp.home m\n"
        "                    ^^^^^^^^^^^ ^^^^^^^^^ ^"
    )


def test_a_sum_that_is_pending_at_a_boundary_is_pointed_at():
    assert fault(make(tokens="b@dp.home s m + cp")) == (
        "no sum can be pending at boundary 'text.tokens'\n"
        "  plan text.tokens: b@dp.home s m + cp\n"
        "                                    ^^\n"
        "  attention and what follows need whole values"
    )


REFUSED = {
    "pattern of no use": (
        make(params={"model.vision.**": replicate(), "**": fsdp("dp cp")}),
        "pattern 'model.vision.**' matches nothing\n  plan params\n"
        "  the name most like it is 'model.visual.",
    ),
    "pattern behind a general one": (
        make(params={"**": fsdp("dp cp"), "model.visual.**": replicate()}),
        "pattern 'model.visual.**' matches only what earlier patterns match",
    ),
    "parameters left over": (
        make(params={"model.visual.**": replicate()}),
        "47 parameters have no storage, the first is 'model.language_model.embed_tokens.weight'",
    ),
    "axis twice in storage": (
        make(params={"**": fsdp("dp dp")}),
        "an axis occurs twice in fsdp('dp dp')",
    ),
    "storage out of mesh order": (
        make(params={"**": fsdp("cp dp")}),
        "parameters are sharded in mesh order only, not over 'cp dp'",
    ),
    "two storages in one unit": (
        make(params={"**.q_proj.weight": replicate(), "**": fsdp("dp cp")}),
        "unit 'model.language_model.layers.0' has two storages",
    ),
    "unknown boundary": (
        make(layouts={"vision.patches": PATCHES, "text.tokens": TOKENS, "vision.patch": "a b"}),
        "unknown boundary 'vision.patch'; did you mean 'vision.patches'?",
    ),
    "derived boundary": (
        make(layouts={"vision.patches": PATCHES, "text.tokens": TOKENS, "vision.q": "a b"}),
        "the layout of boundary 'vision.q' is not a plan's to choose",
    ),
    "missing boundary": (
        make(layouts={"text.tokens": TOKENS}),
        "no layout for boundary 'vision.patches'",
    ),
    "other dims": (
        make(tokens="b@dp.home m"),
        "boundary 'text.tokens' has dims 'b s m' or '(smp s) m'",
    ),
    "pending sum": (make(tokens="b@dp.home s m + cp"), "no sum can be pending at boundary 'text"),
    "pack of images": (
        make(tokens="(img@dp.home s@cp) m"),
        "boundary 'text.tokens' has dims 'b s m' or '(smp s) m'",
    ),
    "cut samples without a mode": (
        make(tokens="(smp@dp.home s@cp) m", attention={"vision": ulysses("cp")}),
        "segments are cut over 'cp', and no attention mode brings their keys together",
    ),
    "width split of a pack": (
        make(tokens="(smp@dp.home s) m@cp", attention={"vision": ulysses("cp")}),
        "text.tokens may split rows and tokens, not 'm'",
    ),
    "width split": (make(tokens="b@dp.home s m@cp"), "text.tokens may split rows and tokens"),
    "mode over a whole axis": (
        make(patches="(img@dp.home s) c"),
        "attention of vision works over 'cp', over which vision.patches is whole",
    ),
    "unknown site": (
        make(attention={"vison": ulysses("cp"), "text": gather("cp")}),
        "unknown attention site 'vison'; did you mean 'vision'?\n"
        "    plan attention 'vison'\n    sites: vision, text",
    ),
    "mode over an unknown axis": (
        make(attention={"vision": ulysses("xp"), "text": gather("cp")}),
        "unknown mesh axis 'xp' in attention",
    ),
    "mode over an unknown part": (
        make(attention={"vision": hybrid(ulysses="cp.0", ring="cp.1"), "text": gather("cp")}),
        "mesh axis 'cp' is not split, so it has no part '0' in attention",
    ),
    "mode over an axis twice": (
        make(attention={"vision": hybrid(ulysses="cp", ring="dp cp"), "text": gather("cp")}),
        "mesh axis 'cp' is named twice in hybrid(ulysses='cp', ring='dp cp')",
    ),
    "mode over nothing": (
        make(attention={"vision": ring(""), "text": gather("cp")}),
        "ring('') names no mesh axis",
    ),
    "hybrid of one": (
        make(attention={"vision": hybrid(ulysses="cp", overlap=True), "text": gather("cp")}),
        "hybrid(ulysses='cp', overlap=True) takes ulysses= and one of gather= and ring=",
    ),
    "hybrid of three": (
        make(attention={"vision": hybrid(ulysses="cp", gather="dp", ring="dp")}),
        "hybrid(ulysses='cp', gather='dp', ring='dp') takes ulysses= and one of gather= and ring=",
    ),
    "two homes": (
        make(patches="(img@cp.home s)@dp c", attention={"vision": ulysses("dp")}),
        "vision.patches is at home over 'cp', text.tokens over 'dp'\n"
        "    plan vision.patches: (img@cp.home s)@dp c\n"
        "                             ^^^^^^^^",
    ),
    "recompute count": (make(checkpoint={"text": 0}), "a count of at least 1, not 'text': 0"),
    "no spec": (make(tokens="b@dp.home s@"), "'@' needs a mesh axis after it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_faults_are_refused(name):
    plan, what = REFUSED[name]
    assert what in fault(plan)


def mode_over(axis):
    """A mode as plans may write it where nothing checks types."""
    mode = ulysses("cp")
    object.__setattr__(mode, "axis", axis)
    return mode


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("mesh", {"dp": 4}, "mesh is {'dp': 4}, not a Mesh(...)\n  plan mesh"),
        ("params", [replicate()], "params is a list, not a dict\n  plan params"),
        ("params", {"**": "fsdp"}, "'fsdp' is not replicate() or fsdp(...)\n  plan params '**'"),
        ("params", {3: replicate()}, "params has 3 for a name\n  plan params"),
        ("layouts", {"text.tokens": None}, "None is not a spec in quotes\n  plan layouts 'text."),
        ("attention", {"text": "ring"}, "'ring' is not ulysses(...), gather(...), ring(...) or"),
        ("attention", {"text": mode_over(3)}, "ulysses(3) names no mesh axis"),
        ("checkpoint", {"text": 1.5}, "1.5 is not a count\n  plan checkpoint 'text'"),
        ("checkpoint", {"text": True}, "True is not a count"),
        (
            "regather",
            "text",
            "regather is 'text', not a tuple of sites\n  plan regather\n  fix: ('text',)",
        ),
        (
            "regather",
            ("texts",),
            "regather names no site 'texts'; did you mean 'text'?\n"
            "  plan regather\n"
            "  sites: vision, text",
        ),
    ],
)
def test_fields_of_another_kind_are_refused(field, value, what):
    plan = make()
    object.__setattr__(plan, field, value)
    assert fault(plan).startswith(what)


# (q heads, kv heads) and the degrees that work, by arithmetic: q is dealt whole, and either kv is
# dealt whole or each kv head is repeated the same number of times.
HEADS = {(8, 2): (1, 2, 4, 8), (28, 7): (1, 7, 14, 28), (6, 6): (1, 2, 3, 6), (16, 16): (1, 2, 4)}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_text_heads_are_dealt_or_refused(heads, degree):
    q, kv = heads
    config = Config.from_dict(
        tiny_raw(text={"num_attention_heads": q, "num_key_value_heads": kv, "head_dim": 16})
    )
    plan = make(
        mesh=Mesh(dp=1, cp=degree), attention={"vision": gather("cp"), "text": ulysses("cp")}
    )
    if degree in HEADS[heads]:
        assert plan.bind(config, degree).mesh.size == degree
    else:
        assert f"cannot be dealt to cp={degree}" in fault(plan, degree, config)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", sorted({*MAIN_PLANS, *OTHER_PLANS} - {*FOUR_RANKS_ONLY}))
def test_plans_fit_even_worlds(name, world):
    bound = load_plan(f"plans/{name}.py", world).bind(tiny_config(), world)
    assert bound.data_ranks == (world if name in EVERY_RANK_READS else world // 2)
    assert bound.copies == 1


def test_every_plan_is_gone_through():
    files = {path.stem for path in Path("plans").glob("*.py") if "def plan(" in path.read_text()}
    assert files == {"single", *MAIN_PLANS, *OTHER_PLANS, *SPLIT_PLANS}


@pytest.mark.parametrize(
    ("name", "world"),
    [("single", 2), ("vision_cp_ulysses", 3), ("decoder_tp", 3), ("decoder_tp_cp", 6)],
)
def test_plans_refuse_worlds_that_do_not_fit(name, world):
    plan = load_plan(f"plans/{name}.py", world)
    assert f"the world has {world}" in fault(plan, world)


def test_a_world_too_small_for_the_plan_is_refused():
    with pytest.raises(PlanError, match="a size is at least 1"):
        load_plan("plans/vision_cp_ulysses.py", 1)


def test_errors_name_the_plan_file_and_line(tmp_path):
    path = tmp_path / "bad.py"
    source = Path("plans/vision_cp_ulysses.py").read_text()
    path.write_text(source.replace(PATCHES, "(img@dp.home s)@xp c"))
    line = 1 + source[: source.index("vision.patches")].count("\n")
    message = fault(load_plan(str(path), 4))
    assert f"{path}:{line} vision.patches: (img@dp.home s)@xp c" in message


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("plans/nothing.py", "no plan file 'plans/nothing.py'"),
        ("plans.nothing", "no plan module 'plans.nothing'"),
        ("model.config", "defines no function plan(world)"),
    ],
)
def test_unknown_plans_are_refused(name, what):
    with pytest.raises(PlanError) as error:
        load_plan(name, 2)
    assert what in str(error.value)


BROKEN = {
    "def plan(:": "SyntaxError: invalid syntax",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "def plan(): pass": "TypeError: plan() takes 0 positional arguments but 1 was given",
    "def plan(world): return 1 // 0": "ZeroDivisionError: integer division or modulo by zero",
    "raise SystemExit(0)": "SystemExit: 0",
}


@pytest.mark.parametrize("source", BROKEN)
def test_a_plan_that_cannot_be_run_is_refused(source, tmp_path):
    path = tmp_path / "plan.py"
    path.write_text(f"\n{source}\n")
    with pytest.raises(PlanError) as error:
        load_plan(str(path), 2)
    place = "" if "takes 0" in str(error.value) else f"\n  {path}:2"
    assert str(error.value) == f"{path} cannot be used as a plan: {BROKEN[source]}{place}"


def test_a_plan_that_is_refused_names_its_line(tmp_path):
    path = tmp_path / "plan.py"
    path.write_text("from vlshard import Mesh\n\ndef plan(world):\n    return Mesh(dp=world - 2)\n")
    with pytest.raises(PlanError) as error:
        load_plan(str(path), 2)
    assert str(error.value).splitlines() == [
        "mesh axis dp=0: a size is at least 1",
        f"  {path}:4",
        "  raised by plan(2), for a world of 2 ranks",
    ]


@pytest.mark.parametrize(
    ("name", "world", "fix"),
    [
        ("vision_cp_ulysses", 1, "2, 4, 6, 8, ..."),
        ("vision_cp_hybrid", 3, "4, 8, 12, 16, ..."),
        ("vision_hsdp", 1, "2, 4, 6, 8, ..."),
    ],
)
def test_a_plan_on_too_few_ranks_says_how_many_it_takes(name, world, fix):
    with pytest.raises(PlanError) as error:
        load_plan(f"plans/{name}.py", world)
    assert str(error.value).splitlines()[-1] == f"  fix: {fix} ranks work"


def test_a_plan_is_found_by_module_too():
    assert load_plan("plans.baseline_dp", 4).layouts == load_plan("plans/baseline_dp.py", 4).layouts


def test_storage_names_every_axis():
    bound = make().bind(tiny_config(), 4)
    assert bound.storages["model.visual"] == Storage((), ("dp", "cp"))
    assert bound.storages["lm_head"] == Storage(("dp", "cp"), ())


HEADER = make_headers(
    [
        SampleFacts(row=0, tokens=13, labelled=3, grids=((1, 4, 6),), starts=(4,)),
        SampleFacts(row=1, tokens=9, labelled=2, grids=((1, 4, 4),), starts=(2,)),
    ],
    ranks=2,
)[0]

# One image of 24 patches on data rank 0 and one of 16 on data rank 1, in units of 4, over cp=2.
ROWS = {
    "(img@dp.home s)@cp c": [12, 12, 8, 8],
    "(img@dp.home s@cp) c": [12, 12, 8, 8],
    "(img@dp.home@cp s) c": [24, 0, 16, 0],
    "(img s)@cp c": [20, 20, 20, 20],
    "(img@cp s) c": [24, 16, 24, 16],
}


@pytest.mark.parametrize("patches", ROWS)
def test_moving_one_at_changes_the_rows_of_each_rank(patches, tmp_path):
    path = tmp_path / "moved.py"
    source = Path("plans/vision_cp_ulysses.py").read_text()
    path.write_text(source.replace(PATCHES, patches))
    bound = load_plan(str(path), 4).bind(tiny_config(), 4)
    assert [len(bound.share(HEADER, rank).patches) for rank in range(4)] == ROWS[patches]


def test_the_deal_is_told_with_the_imbalance_before_and_after():
    grids = ((1, 8, 8), (1, 2, 2), (1, 4, 4), (1, 2, 6))
    facts = [SampleFacts(i, 20, 1, (grid,), (0,)) for i, grid in enumerate(grids)]
    bound = make(patches="(img@(dp cp).balance s) c", attention={"text": gather("cp")}).bind(
        tiny_config(), 4
    )
    header = make_headers(facts, 2)[0]
    costs = [64 * n * n + 6912 * n for n in (64, 16, 12, 4)]
    mean = sum(costs) / 4
    shares = [f"{cost / mean:.2f}" for cost in costs]
    lines = bound.describe_deal(header).splitlines()
    assert lines[0] == "4 frames, 96 patches"
    assert lines[1:5] == [
        f"  rank {rank}: {n} patches, {share} of an even share"
        for rank, (n, share) in enumerate(zip((64, 16, 12, 4), shares, strict=True))
    ]
    # Read at home: ranks 0 and 1 both hold the frames of 64 and 4, ranks 2 and 3 the others.
    before = (costs[0] + costs[3]) / mean
    assert lines[5:] == [f"  largest share {shares[0]}; where they are read {before:.2f}"]


def test_ranks_that_get_as_much_share_a_line():
    facts = [SampleFacts(i, 20, 1, ((1, 8, 8),), (0,)) for i in range(4)]
    plan = make(patches="(img@dp.home s)@cp c", attention=dict.fromkeys(SITES, gather("cp")))
    lines = plan.bind(tiny_config(), 4).describe_deal(make_headers(facts, 2)[0]).splitlines()
    assert lines[1] == "  ranks 0-3: 64 patches, 1.00 of an even share"


def test_padding_is_rounded_up_to_the_divisor():
    share = make().bind(tiny_config(), 4).share(HEADER, 0)
    assert np.array_equal(share.positions, [[0, 1, 2, 3, 12, 13, 14, 15]])
    assert np.array_equal(share.samples, [[0] * 8])


def test_large_images_are_computed_once():
    facts = [
        SampleFacts(row=i, tokens=300, labelled=9, grids=((1, 32, 32),), starts=(4,))
        for i in range(4)
    ]
    for name, world in (("vision_cp_ulysses", 2), ("vision_cp_colossal", 2), ("baseline_dp", 2)):
        bound = load_plan(f"plans/{name}.py", world).bind(tiny_config(), world)
        header = make_headers(facts, bound.data_ranks)[0]
        assert [len(bound.share(header, rank).patches) for rank in range(2)] == [2048, 2048]
