import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from transformers import Qwen3VLMoeForConditionalGeneration

from tests.train_folder import broken_rows, make_folder

ROOT = Path(__file__).resolve().parents[2]
ULYSSES = "plans/vision_cp_ulysses.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with weights and the processor's settings, and rows with images."""
    return make_folder(tmp_path_factory.mktemp("train"))


def command(folder, *more, world=None, ranks=None, data=None):
    """The program in one process, under torchrun, or on ranks that it starts itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    found = [*(launcher if world else [sys.executable]), "examples/train.py"]
    if ranks:
        found = [sys.executable, "-m", "model.training", "--ranks", str(ranks)]
    found += ["--model", folder / "model", "--data", data or folder / "rows.jsonl"]
    return [str(part) for part in (*found, *more)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


HELP = """
import runpy, sys
sys.argv[1:] = ["--help"]
try:
    runpy.run_path("examples/train.py", run_name="__main__")
finally:
    print([name for name in ("torch", "transformers", "rich") if name in sys.modules])
"""


def test_help_is_told_before_torch_is_imported():
    call = [sys.executable, "-c", HELP]
    done = subprocess.run(
        call, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=60
    )
    assert "peak learning rate" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_torchrun_trains_and_exports_what_transformers_loads(folder, tmp_path):
    arguments = ["--plan", ULYSSES, "--steps", "3", "--batch", "3", "--lr", "1e-2", "--pack"]
    outputs = ["--save", tmp_path / "out", "--plot", tmp_path / "plot.png"]
    outputs += ["--metrics", "/dev/full"]
    done = subprocess.run(
        command(folder, *arguments, *outputs, world=2),
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3  loss" in done.stdout
    weights = f"weights: loaded from {folder / 'model'} (model.safetensors)"
    told = done.stdout.splitlines()
    assert told[0] == f"plan {ULYSSES} on 2 ranks: dp=1 cp=2"
    assert weights in told and told[-1] == f"model exported to {tmp_path / 'out'}"
    told = "warning: /dev/full cannot be written: No space left on device; the run goes on"
    assert done.stderr.count(told) == 1
    assert "text.tokens     (smp@dp.home s@cp.zigzag) m; attention gather" in done.stdout
    with Image.open(tmp_path / "plot.png") as plot:
        assert plot.width > 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plot.png"]
    model, report = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    source = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder / "model")
    moved = [
        (a - b).abs().max().item()
        for a, b in zip(model.parameters(), source.parameters(), strict=True)
    ]
    assert 0 < min(moved) and max(moved) < 0.05


def test_torchrun_tells_a_fault_of_the_last_rank_once(folder, tmp_path):
    data = broken_rows(folder, tmp_path / "broken", 3, text='{"a')
    arguments = ["--plan", "plans/baseline_dp.py", "--steps", "3", "--batch", "3", "--no-shuffle"]
    done = subprocess.run(
        command(folder, *arguments, "--save", tmp_path / "out", world=2, data=data),
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert f"error: {data}:3: broken JSON" in done.stderr
    assert 'examples/train.py", line' not in done.stderr
    assert f"traceback : {data}:3: broken JSON" in done.stderr.splitlines()[-2]  # of torchrun
    assert not (tmp_path / "out").exists()


def test_ranks_end_with_one_error_last(folder, tmp_path):
    data = broken_rows(folder, tmp_path / "broken", 3, text='{"a')
    arguments = ["--plan", "plans/baseline_dp.py", "--steps", "3", "--batch", "3", "--no-shuffle"]
    done = subprocess.run(
        command(folder, *arguments, "--save", tmp_path / "out", ranks=2, data=data),
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {data}:3: broken JSON") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def trains(folder, tmp_path, *more, ranks=None, **options):
    """A process that has done a step of very many."""
    metrics = tmp_path / "metrics.jsonl"
    arguments = ["--steps", "100000", "--batch", "2", "--metrics", metrics, *more]
    process = subprocess.Popen(
        command(folder, *arguments, ranks=ranks),
        cwd=ROOT,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.1)
    assert process.poll() is None
    return process


def test_a_signal_exports_what_was_trained_whoever_listens(folder, tmp_path):
    save = ["--plan", "plans/single.py", "--save", tmp_path / "out"]
    with open("/dev/full", "w") as full:
        process = trains(folder, tmp_path, *save, stdout=full)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert errors.splitlines() == [
        "SIGTERM: stopping after this step; a second one ends at once, saving nothing"
    ]
    _, report = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_a_second_signal_ends_a_rank_that_waits_for_a_stopped_one(folder, tmp_path):
    chosen = ["--plan", "plans/baseline_dp.py", "--save", tmp_path / "out"]
    process = trains(folder, tmp_path, *chosen, ranks=2, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    waiting, stopped = map(int, children.split())
    try:
        os.kill(stopped, signal.SIGSTOP)
        for _ in range(2):
            time.sleep(0.7)
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and Path(f"/proc/{waiting}").exists():
            time.sleep(0.05)
        assert not Path(f"/proc/{waiting}").exists()
    finally:
        os.kill(stopped, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert not (tmp_path / "out").exists()
