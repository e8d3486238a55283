"""What summing gradients once a step saves and costs: ``--reduce every`` beside ``--reduce last``.

``make bench`` runs it: two CPU ranks, four micro-batches a step, FSDP over both. Bytes are those
that rank 0 hands to reductions of gradients in a step, and the most that were alive at once of
tensors that a step has made; seconds are the median of five steps.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from model.data.loader import Loader
from model.training.build import build_model
from model.training.job import prepare
from model.training.settings import Settings
from model.training.trainer import Trainer
from tests.benchmarks.launch import inside_ranks, on_ranks
from tests.benchmarks.live_bytes import LiveBytes
from tests.tiny import tiny_raw
from tests.train_folder import PROCESSOR, write_rows
from vlshard.storage.fsdp_collectives import GlooReduceScatter

MICRO_BATCHES, STEPS = 4, 7
TEXT = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 16}


def write_folder(folder: Path) -> None:
    """A model without weights, and rows with an image every other time."""
    (folder / "model").mkdir()
    raw = tiny_raw(text=TEXT, vision={"out_hidden_size": 256})
    (folder / "model" / "config.json").write_text(json.dumps(raw))
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    write_rows(folder, [[(32, 48)], []] * 8)


def measured(folder: Path, reduce: str) -> dict[str, float]:
    """Bytes and seconds of a step; every rank calls it."""
    settings = Settings(
        plan="plans/baseline_dp.py",
        model=folder / "model",
        data=folder / "rows.jsonl",
        steps=STEPS,
        batch=2 * MICRO_BATCHES,
        micro_batch=1,
        reduce=reduce,
    )
    cpu = torch.device("cpu")
    job = prepare(settings, cpu)
    trainer = Trainer(settings, build_model(settings, job, cpu), cpu, job.bound)
    sent, call, seconds, peak = [0], GlooReduceScatter.__call__, list[float](), 0

    def counted(self, output_tensor, input_tensor, *args, **kwargs):
        sent[0] += input_tensor.nbytes
        return call(self, output_tensor, input_tensor, *args, **kwargs)

    group = dist.new_group(backend="gloo")
    with Loader(job.reading, job.rows, job.images, job.config, job.bound, group) as batches:
        for batch in batches:
            if batch.step == STEPS:
                GlooReduceScatter.__call__ = counted
                with LiveBytes() as live:
                    trainer.step(batch)
                GlooReduceScatter.__call__ = call
                peak = live.peak
                continue
            start = time.perf_counter()
            trainer.step(batch)
            seconds.append(time.perf_counter() - start)
    stored = sum(p.numel() for p in trainer.model.parameters()) * 4
    return {
        "parameters": stored,
        "sent": sent[0],
        "alive": peak,
        "seconds": statistics.median(seconds[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    options, _ = parser.parse_known_args()
    if inside_ranks():
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        found = {kind: measured(options.folder, kind) for kind in ("every", "last")}
        if dist.get_rank() == 0:
            print(json.dumps(found))
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as place:
        write_folder(Path(place))
        told = on_ranks("tests.benchmarks.bench_reduce", ["--folder", place]).splitlines()[-1]
    found = json.loads(told)
    whole = found["every"]["parameters"]
    print(f"{whole / 2**20:.1f} MiB of parameters, {MICRO_BATCHES} micro-batches a step, two ranks")
    print(f"{'--reduce':10}{'reduced MiB':>13}{'alive MiB':>11}{'s a step':>10}")
    for kind, row in found.items():
        cells = f"{row['sent'] / 2**20:13.1f}{row['alive'] / 2**20:11.1f}{row['seconds']:10.3f}"
        print(f"{kind:10}{cells}")


if __name__ == "__main__":
    main()
