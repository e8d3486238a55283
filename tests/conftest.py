import importlib.util
import sys
from pathlib import Path

import pytest

path = Path(__file__).parent / "dist" / "ranks.py"
module_spec = importlib.util.spec_from_file_location("vlshard_test_ranks", path)
pool = importlib.util.module_from_spec(module_spec)
sys.modules["vlshard_test_ranks"] = pool
module_spec.loader.exec_module(pool)


@pytest.fixture(scope="session")
def ranks():
    """``ranks(4).run(function, *args)``: pools of gloo ranks, started at first use and kept."""
    pools = {}

    def get(world):
        return pools.setdefault(world, pool.Ranks(world))

    yield get
    for running in pools.values():
        running.close()
