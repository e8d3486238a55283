"""Kills a rank at named moments of a run, and lets the run go on from what is there.

``make kill`` does so at 60 of them, drawn from a seed: the other rank ends soon, with one clear
error, and the run that goes on ends with the loss and the weights of one that nothing disturbed,
bit for bit.
"""

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from model.training.launch import lost_rank
from tests.dist.ranks import Ranks
from tests.train_folder import make_folder, options, read_metrics, run_train

MOMENTS = {
    "reading data": "model.data.loader.Loader._load",
    "forward": "model.modules.qwen3_vl_moe.Qwen3VLMoe.forward",
    "backward": "torch.Tensor.backward",
    "exchange": "vlshard.comm.collectives.move_rows",
    "gathering parameters": "vlshard.storage.fsdp_collectives.GlooAllGather.__call__",
    "summing gradients": "vlshard.storage.fsdp_collectives.GlooReduceScatter.__call__",
    "update": "torch.optim.AdamW.step",
    "saving": "model.checkpoint.steps.save_tensors",
    "saving a file": "vlshard.storage.saved._Noted.write",
    "writing run.json": "model.checkpoint.steps.write_run",
    "renaming": "model.checkpoint.steps.put_in_place",
    "removing an old one": "model.training.checkpoints.remove_steps",
    "testing files": "model.checkpoint.steps.file_faults",
    "resuming": "model.training.checkpoints.load_tensors",
    "resuming a tensor": "vlshard.storage.saved._LoadPlanner.resolve_tensor",
    "exporting": "model.checkpoint.save_load.save_file",
    "renaming the export": "model.checkpoint.save_load.put_in_place",
}
RESUMING = ("testing files", "resuming", "resuming a tensor")
LIMIT = 30.0  # seconds for the others to end


@dataclass(frozen=True)
class Case:
    """One death.

    Attributes:
      moment: one of ``MOMENTS``.
      rank: that dies.
      call: the how many-th call of that moment it is.
      after: whether the call is done before.
    """

    moment: str
    rank: int
    call: int
    after: bool

    def __str__(self) -> str:
        when = "after" if self.after else "before"
        return f"{self.moment}: rank {self.rank}, {when} call {self.call}"


def watched(target, act):
    """Have a function called with ``act`` before and after each of its calls on this rank."""
    path, _, name = target.rpartition(".")
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, kind = path.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    original, calls = getattr(owner, name), Counter()

    def call(*args, **kwargs):
        calls[name] += 1
        number = calls[name]
        act(number, False)
        found = original(*args, **kwargs)
        act(number, True)
        return found

    return mock.patch.object(owner, name, call)


def die(case, run):
    """Run until the case's moment comes; what the others say, and after how many seconds."""
    found: list[float] = []

    def act(call, after):
        if (call, after) == (case.call, case.after):
            if dist.get_rank() == case.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            found.append(time.monotonic())

    with watched(MOMENTS[case.moment], act):
        try:
            text = run_train(run)
        except BaseException as error:
            text = lost_rank(error) or f"{type(error).__name__}: {error}"
    return text, time.monotonic()


def count_calls(run):
    """How often each moment comes on this rank."""
    counts = Counter()
    with ExitStack() as stack:
        for moment, target in MOMENTS.items():
            def act(call, after, moment=moment):
                counts[moment] = call

            stack.enter_context(watched(target, act))
        return run_train(run), counts


class Kills:
    """Runs of one small model that are killed, beside one that is not."""

    def __init__(self, folder, ranks, steps=4):
        """Make the model and the run that nothing disturbs."""
        self.folder, self.ranks, self.steps = make_folder(folder / "model"), ranks, steps
        self.place = folder / "killed"
        straight = folder / "straight"
        found = ranks.run(count_calls, self.options(straight), timeout=240)
        assert [status for status, _ in found] == [0, 0]
        self.counts = [counts for _, counts in found]
        self.expected = self.result(straight)
        shutil.rmtree(straight / "checkpoints" / f"step-{steps:08d}")
        found = ranks.run(count_calls, self.options(straight), timeout=240)
        for counts, (_, more) in zip(self.counts, found, strict=True):
            counts |= {moment: more[moment] for moment in RESUMING}

    def options(self, place, **more):
        paths = {name: place / name for name in ("metrics", "save")}
        return options(
            self.folder,
            plan="plans/vision_cp_ulysses.py",
            checkpoint=place / "checkpoints",
            checkpoint_every=1,
            resume="auto",
            keep=2,
            batch=2,
            overwrite=True,
            **({"steps": self.steps} | paths | more),
        )

    def result(self, place):
        """The last loss, and the bytes of the weights."""
        losses = [line["loss"] for line in read_metrics(place / "metrics") if "loss" in line]
        return losses[-1], (place / "save" / "model.safetensors").read_bytes()

    def draw(self, number, seed):
        """Cases that come, each moment as often as the others."""
        chance, cases = random.Random(seed), []
        names = list(MOMENTS)
        chance.shuffle(names)
        while len(cases) < number:
            moment = names[len(cases) % len(names)]
            ranks = [rank for rank, counts in enumerate(self.counts) if counts[moment]]
            rank = chance.choice(ranks)
            call = chance.randint(1, self.counts[rank][moment])
            cases.append(Case(moment, rank, call, chance.random() < 0.5))
        return cases

    def kill(self, case):
        """What is wrong after a death, and what the other rank said; seconds it took to end."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        run = self.options(self.place)
        if case.moment in RESUMING:
            assert self.ranks.run(run_train, run | {"stop_after": 2}, timeout=120) == [0, 0]
        start = time.monotonic()
        found = self.ranks.outcomes(die, case, run, timeout=120)
        seconds = time.monotonic() - start
        said = [text for text in found if text is not None]
        faults = []
        if found[case.rank] is not None:
            faults.append(f"rank {case.rank} lived: {found[case.rank]}")
        if len(said) != 1:
            faults.append("the other rank did not end")
        text = said[0][0] if said else ""
        if "another rank has gone" not in str(text) and text != 0:
            faults.append(f"the other rank said: {text}")
        again = self.ranks.run(run_train, run, timeout=120)
        if again != [0, 0]:
            faults.append(f"going on ended with {again}")
        elif self.result(self.place) != self.expected:
            faults.append("loss or weights are others")
        left = sorted(path.name for path in (self.place / "checkpoints").iterdir())
        if left != [f"step-{step:08d}" for step in (self.steps - 1, self.steps)]:
            faults.append(f"left: {left}")
        return faults, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(2)
        kills = Kills(Path(folder), ranks)
        for case in kills.draw(given.moments, given.seed):
            faults, seconds = kills.kill(case)
            wrong += bool(faults)
            print(f"{case!s:60} {seconds:5.1f} s  {'; '.join(faults) or 'goes on bit for bit'}", flush=True)
        ranks.close()
    print(f"{given.moments - wrong} of {given.moments} as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
