import subprocess
import sys


def test_some_programs_are_the_cheapest_right_and_no_dearer_than_dtensors():
    """A few pairs; ``make parity`` checks all, and three axes. Slow under the shape hook."""
    command = [sys.executable, "-m", "tests.vlshard.exhaustive", "--draw", "3", "--jobs", "1"]
    command += ["--sets", "steps", "values", "dtensor"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)
