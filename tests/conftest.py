import pytest

from tests import shape_hook
from tests.dist.ranks import Origin, Ranks

shape_hook.install()

ORIGIN = pytest.StashKey[Origin]()
# Files that take longest come first, so that no worker is left with one at the end.
LONGEST = (
    "tests/dist/test_parity.py",
    "tests/model/training/test_train.py",
    "tests/examples/test_train.py",
    "tests/dist/test_mode_layouts.py",
    "tests/dist/test_training.py",
    "tests/dist/test_plan_mixes.py",
    "tests/dist/test_boundaries.py",
    "tests/dist/test_programs.py",
    "tests/dist/test_several_steps.py",
    "tests/vlshard/programs/test_exhaustive.py",
)


def pytest_collection_modifyitems(items):
    """The order in which ``--dist loadfile --no-loadscope-reorder`` hands files to workers."""
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(place)))


def pytest_collection_finish(session):
    """Ranks come from this process as it is now: all tests are imported, none has run."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[ORIGIN] = Origin()


@pytest.fixture(scope="session")
def ranks(request):
    """``ranks(4).run(function, *args)``: pools of gloo ranks, started at first use and kept."""
    pools, origin = {}, request.config.stash[ORIGIN]

    def get(world):
        return pools.setdefault(world, Ranks(world, origin))

    yield get
    for running in pools.values():
        running.close()


TABLE = pytest.StashKey()
FROM_WORKERS = "parity table"


def pytest_addoption(parser):
    parser.addoption(
        "--all-pairs",
        action="store_true",
        help="carry out every pair of specs, case of an attention mode and mix of modes, not some",
    )


def pytest_configure(config):
    config.stash[TABLE] = []


@pytest.fixture
def parity_table(request):
    """Takes one row of the table that the run ends with."""

    def add(plan, world, case, found, off, norm_off, gradients):
        wrong = len(found.faults)
        state = f"{wrong} off" if wrong else f"{gradients} equal"
        numbers = f"{found.loss:10.6f}{off:9.1e}{norm_off:9.1e}  {state}"
        request.config.stash[TABLE].append(f"{plan:24}{world:5}  {case:31}{numbers}")

    return add


def pytest_sessionfinish(session):
    """A worker hands its rows over."""
    if ORIGIN in session.config.stash:
        session.config.stash[ORIGIN].close()
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[FROM_WORKERS] = session.config.stash[TABLE]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """The rows of a worker that is done."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[TABLE].extend(output.get(FROM_WORKERS, ()))


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[TABLE]
    if not rows:
        return
    write = terminalreporter.write_line
    terminalreporter.section("parity with one process")
    write(f"{'plan':24}{'ranks':>5}  {'case':31}{'loss':>10}{'off':>9}{'norm off':>9}  gradients")
    for row in sorted(rows):
        write(row)
