"""Bytes that a split decoder keeps for backward, per rank, and what it sends for that.

``make bench`` runs it: dense layers over two ranks, tokens whole between blocks, cut, cut and
gathered again in backward, cut and every layer recomputed. Weights and their gradients do not
count, nor do loss and head: what does is what is alive between forward and backward, the most that
a pass makes, and the elements of activations that a rank sends.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from model.config.config import Config
from tests.batches import Builder
from tests.benchmarks.launch import inside_ranks, on_ranks
from tests.benchmarks.live_bytes import LiveBytes
from tests.dist.events import collectives, messages
from tests.tiny import tiny_raw
from tests.training import Run

TOKENS, LAYERS, WIDTH = 2048, 4, 256
SUM = "all_reduce", "vlshard.comm.transport"
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "mlp_only_layers": list(range(LAYERS)),
    "rope_parameters": {"rope_theta": 1e4, "mrope_section": [16, 8, 8], "mrope_interleaved": True},
}
CASES = {
    "tokens whole": ("s", ""),
    "tokens cut": ("s@tp", ""),
    "cut, gathered again": ("s@tp", 'regather=("text",),'),
    "cut, recomputed": ("s@tp", 'checkpoint={"text": 1},'),
}
PLAN = """
from plans.decoder_parallel import tensor_parallel
from vlshard import Mesh, Plan, replicate

def plan(world):
    layouts = {{"vision.patches": "(img@dp.home s) c", "text.tokens": "b@dp.home {rows} m"}}
    return Plan(
        Mesh(dp=1, tp=world), {{"**": replicate()}}, layouts, splits=tensor_parallel("tp"), {more}
    )
"""


def measured(name: str) -> tuple[int, int, int]:
    """Bytes kept, bytes at the peak and elements sent, of rank 0."""
    rows, more = CASES[name]
    config = Config.from_dict(tiny_raw(text=TEXT, vision={"out_hidden_size": WIDTH}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.py"
        path.write_text(PLAN.format(rows=rows, more=more))
        run = Run(config, str(path))
    batch = Builder(config, 1).add(TOKENS, labelled=range(1, 9)).batch()
    (header,) = run.headers(batch)
    run.one_forward_backward(batch, header, run.bound.step(header))  # makes the gradients
    at, kept, backward = run.bound.step(header), [], torch.Tensor.backward

    def noted(loss: torch.Tensor) -> None:
        kept.append(counted.alive())
        backward(loss)

    torch.Tensor.backward = noted
    try:
        with LiveBytes() as counted, messages() as sent, collectives() as calls:
            run.one_forward_backward(batch, header, at)
    finally:
        torch.Tensor.backward = backward
    reduced = sum(call.elements for call in calls if call.made == SUM)
    return kept[0], counted.peak, sum(sent) + reduced  # of two ranks a sum sends its size


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_known_args()
    if inside_ranks():
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        for name in CASES:
            found = measured(name)
            if dist.get_rank() == 0:
                print(*found)
        dist.destroy_process_group()
        return
    lines = on_ranks("tests.benchmarks.bench_split_memory", [], 2).splitlines()
    unit = TOKENS * WIDTH * 4
    print(f"{TOKENS} tokens of width {WIDTH}, {LAYERS} dense layers, fp32, two CPU ranks")
    print(f"{'':22}{'kept MB':>9}{'peak MB':>9}{'sent MB':>9}{'kept, in whole tokens a layer':>31}")
    for name, line in zip(CASES, lines, strict=True):
        kept, peak, sent = map(int, line.split())
        told = "".join(f"{count / 1e6:9.1f}" for count in (kept, peak, 4 * sent))
        print(f"{name:22}{told}{kept / unit / LAYERS:31.2f}")


if __name__ == "__main__":
    main()
