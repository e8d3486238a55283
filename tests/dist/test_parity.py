"""Every plan on every kind of batch, on 2 and 4 ranks, equals one process."""

from functools import cache

import pytest

from model.config.config import Config
from tests.batches import batches
from tests.plan_names import CUT_IMAGE_PLANS, FOLLOWED_PLANS, MAIN_PLANS, OTHER_PLANS
from tests.tiny import tiny_config
from tests.training import Outcome, Run

MORE_CASES = (
    "mixed sizes",
    "images on the first rank only",
    "text only",
    "one sample, one image",
    "one-token images",
    "video and image",
)
SEED = 3


TRAINED_STEPS = 20
TRAINED = ("mixed sizes", "images on the last rank only", "unequal token counts")


def path(plan: str) -> str:
    return f"plans/{plan}.py"


def everything(
    plan: str | None, raw, steps: int, expected: dict[str, Outcome] | None = None
) -> tuple[dict[str, Outcome], Outcome]:
    """One step from the same weights on each case, then some steps of training."""
    run = Run(Config.from_dict(raw), plan, seed=SEED)
    cases, known = batches(run.config), expected or {}
    single = {name: run.probe(cases[name], known.get(name)) for name in known or cases}
    trained = run.train([cases[name] for name in TRAINED], steps=steps, weight_decay=0.1)
    return single, trained


@cache
def reference() -> tuple[dict[str, Outcome], Outcome]:
    return everything(None, tiny_config().raw, TRAINED_STEPS)


@pytest.fixture(scope="module")
def outcomes(ranks):
    """Per rank what ``everything`` gave, run once for each plan and number of ranks."""
    known = {}

    def get(plan, world):
        if (plan, world) not in known:
            raw = tiny_config().raw
            steps = TRAINED_STEPS if world == 2 and plan in FOLLOWED_PLANS else 0
            single = reference()[0]
            names = single if plan in MAIN_PLANS else MORE_CASES
            arguments = (path(plan), raw, steps, {name: single[name] for name in names})
            known[plan, world] = ranks(world).run(everything, *arguments, timeout=180)
        return known[plan, world]

    return get


@pytest.mark.parametrize("case", batches(tiny_config()))
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("plan", MAIN_PLANS)
def test_plan_equals_one_process(plan, world, case, outcomes, parity_table):
    found, expected = outcomes(plan, world)[0][0][case], reference()[0][case]
    off = abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-9)
    norm_off = abs(found.norm - expected.norm) / max(expected.norm, 1e-9)
    parity_table(plan, world, case, found, off, norm_off, len(expected.gradients))
    assert found.faults == []
    assert off <= 1e-6  # fp32 sums in another order
    assert norm_off <= 1e-5


@pytest.mark.parametrize("case", MORE_CASES)
@pytest.mark.parametrize("plan", OTHER_PLANS)
def test_other_plans_equal_one_process(plan, case, outcomes, parity_table):
    test_plan_equals_one_process(plan, OTHER_PLANS[plan], case, outcomes, parity_table)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("plan", MAIN_PLANS)
def test_every_rank_logs_the_same_numbers(plan, world, outcomes):
    per_rank = outcomes(plan, world)
    for case in batches(tiny_config()):
        assert len({(single[case].loss, single[case].norm) for single, _ in per_rank}) == 1
    assert len({(*trained.losses, *trained.norms) for _, trained in per_rank}) == 1


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("plan", CUT_IMAGE_PLANS)
def test_vision_work_is_split_evenly_inside_each_pair(plan, world, outcomes):
    for case, outcome in outcomes(plan, world)[0][0].items():
        rows = outcome.patches[0]
        total = sum(len(pixels) for pixels in batches(tiny_config())[case].pixels.values())
        assert sum(rows) == total
        if world == 2:
            micro_batches = 5 if "micro" in case else 1
            assert max(rows) <= total / 2 + 4 * micro_batches


@pytest.mark.parametrize("plan", FOLLOWED_PLANS)
def test_twenty_steps_follow_one_process(plan, outcomes):
    found, expected = outcomes(plan, 2)[0][1], reference()[1]
    assert len(found.losses) == TRAINED_STEPS
    pairs = zip(found.losses, expected.losses, strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1e-5
    pairs = zip(found.norms, expected.norms, strict=True)
    assert max(abs(a - b) / b for a, b in pairs) <= 2e-5
