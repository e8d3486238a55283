"""A rank that is killed at any moment costs no more than the steps since the last checkpoint."""

import pytest

from tests.dist.kill import LIMIT, MOMENTS, Kills

SEED, DEATHS = 0, 5


@pytest.fixture(scope="module")
def kills(ranks, tmp_path_factory):
    return Kills(tmp_path_factory.mktemp("killed"), ranks(2), steps=3)


def test_each_moment_comes(kills):
    assert [moment for moment in MOMENTS if not any(c[moment] for c in kills.counts)] == []


@pytest.mark.parametrize("number", range(DEATHS))
def test_a_run_goes_on_after_a_death(kills, number):
    faults, seconds = kills.kill(kills.draw(DEATHS, SEED)[number])
    assert faults == []
    assert seconds < LIMIT
