"""Whole steps under every attention mode over every layout of the patches equal one process.

One model a mesh takes all of them in turn: what a plan says about patches and modes leaves the
weights where they are. ``--all-pairs`` adds the modes in flight.
"""

from dataclasses import replace
from functools import cache

import pytest

from model.config.config import Config
from tests.batches import Builder, batches
from tests.tiny import tiny_raw
from tests.training import Outcome, Run
from vlshard import gather, hybrid, ring, ulysses
from vlshard.plan.plan import load_plan

SEED = 5
SPREAD = {"initializer_range": 0.08}
LAYOUTS = {
    "pack cut": "(img@dp.home s)@cp c",
    "each frame cut": "(img@dp.home s@cp) c",
    "dealt inside cp": "(img@dp.home@cp.balance s) c",
    "dealt over all": "(img@(dp cp).balance s) c",
}
# Meshes: ranks, and a plan in plans/ that has the mesh.
MESHES = {
    "dp1 cp2": (2, "vision_cp_colossal"),
    "dp2 cp2": (4, "vision_cp_colossal"),
    "dp1 cp2x2": (4, "vision_cp_hybrid"),
}
SIMPLE = {"gather": gather, "ulysses": ulysses, "ring": ring}
HYBRID = {"hybrid with gather": "gather", "hybrid with ring": "ring"}
CUT = ("pack cut", "each frame cut")
FLYING = ", in flight"


def modes_of(mesh: str, name: str):
    """Modes by name: none where frames stay whole; sync and overlapped."""
    modes = {} if name in CUT else {"none": None}
    for flies in (False, True):
        suffix = FLYING if flies else ""
        if mesh == "dp1 cp2x2":
            for mode, outer in HYBRID.items():
                axes = {"ulysses": "cp.ulysses", outer: "cp.ring"}
                modes[mode + suffix] = hybrid(**axes, overlap=flies)
        else:
            axes = "dp cp" if name == "dealt over all" else "cp"
            modes |= {m + suffix: make(axes, overlap=flies) for m, make in SIMPLE.items()}
    return modes


def mixes(flying: bool):
    """Mesh, layout and mode; those in flight only where asked for."""
    return [
        (mesh, name, mode)
        for mesh in MESHES
        for name in LAYOUTS
        for mode in modes_of(mesh, name)
        if flying or FLYING not in mode
    ]


def pytest_generate_tests(metafunc):
    """All modes with ``--all-pairs``, else those that wait."""
    if "mode" in metafunc.fixturenames:
        chosen = mixes(metafunc.config.getoption("all_pairs"))
        metafunc.parametrize(("mesh", "name", "mode"), chosen)


def raw():
    """Four vision heads, for all-to-all over four ranks; fewer layers than other tests have."""
    vision = {"num_heads": 4, "depth": 2, "deepstack_visual_indexes": [0, 1]}
    return tiny_raw(text={**SPREAD, "num_hidden_layers": 2}, vision={**SPREAD, **vision})


def cases(config: Config):
    known = batches(config)
    return {
        "mixed": known["mixed sizes"],
        "one huge": Builder(config, 31).add(3, (12, 16), 2).add(7).batch(),
        "crumbs": known["one-token images"],
        "half the ranks empty": known["images on the first rank only"],
        "video": known["video and image"],
        "text only": known["text only"],
    }


@cache
def reference() -> dict[str, Outcome]:
    run = Run(Config.from_dict(raw()), None, seed=SEED)
    return {name: run.probe(batch) for name, batch in cases(run.config).items()}


def probe_all(mesh: str, chosen: list[tuple[str, str]], expected: dict[str, Outcome]):
    """For each layout, mode and case: loss, norm and which gradients are off."""
    path = f"plans/{MESHES[mesh][1]}.py"
    run = Run(Config.from_dict(raw()), path, seed=SEED)
    plan, batches_by_name, found = load_plan(path, run.bound.mesh.size), cases(run.config), {}
    for name, mode in chosen:
        vision = modes_of(mesh, name)[mode]
        modes = {"text": plan.attention["text"]} | ({"vision": vision} if vision else {})
        layouts = {**plan.layouts, "vision.patches": LAYOUTS[name]}
        changed = replace(plan, layouts=layouts, attention=modes)
        run.bound = changed.bind(run.config, plan.mesh.size)
        for case in expected:
            outcome = run.probe(batches_by_name[case], expected[case])
            found[name, mode, case] = outcome.loss, outcome.norm, outcome.faults
    return found


@pytest.fixture(scope="module")
def outcomes(ranks, request):
    known, flying = {}, request.config.getoption("all_pairs")

    def get(mesh):
        if mesh not in known:
            world, _ = MESHES[mesh]
            chosen = [mix[1:] for mix in mixes(flying) if mix[0] == mesh]
            limit = 1500 if flying else 280
            known[mesh] = ranks(world).run(probe_all, mesh, chosen, reference(), timeout=limit)
        return known[mesh]

    return get


def test_step_equals_one_process(mesh, name, mode, outcomes):
    for of_rank in outcomes(mesh):
        for case, expected in reference().items():
            loss, norm, faults = of_rank[name, mode, case]
            assert faults == [], case
            assert loss == pytest.approx(expected.loss, rel=1e-6), case
            assert norm == pytest.approx(expected.norm, rel=1e-5), case
