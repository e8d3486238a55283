"""Rates by part, and gradients that are summed over ranks once a step."""

import pytest
import torch
import torch.distributed as dist

from model.data.loader import Loader
from model.training.build import build_model
from model.training.command_line import SettingsError
from model.training.job import prepare
from model.training.settings import Settings
from model.training.trainer import Trainer, decay_groups, rate_factors
from tests.train_folder import CPU, make_folder, options, read_metrics, run_train, write_rows
from tests.training import full
from vlshard import ShardError
from vlshard.storage.fsdp_collectives import GlooReduceScatter

NAMES = ["model.visual.merger.norm.weight", "model.visual.pos_embed.weight", "lm_head.weight"]


def test_the_last_pattern_that_matches_counts():
    given = [("model.visual.*", 0.1), ("*.merger.*", 0.5)]
    assert rate_factors(NAMES, given) == [0.5, 0.1, 1.0]
    assert rate_factors(NAMES, []) == [1.0, 1.0, 1.0]
    with pytest.raises(ShardError) as error:
        rate_factors(NAMES, [("model.vision.*", 0.1)])
    assert str(error.value).startswith("--lr-of 'model.vision.*' matches no parameter that is")


def test_groups_keep_rate_and_decay_apart():
    matrix, norm, other = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), 2, (3, 3)))
    groups = decay_groups([matrix, norm, other], 0.5, "matrices", [0.1, 0.1, 1.0])
    found = [(group["params"], group["weight_decay"], group["factor"]) for group in groups]
    assert found == [([matrix], 0.5, 0.1), ([norm], 0.0, 0.1), ([other], 0.5, 1.0)]


def test_factors_are_read_from_the_command_line():
    required = "--plan p.py --model m --data d.jsonl --steps 10 --batch 4".split()
    more = "--lr-of a.*=0.1 b=2 --lr-of c=d=1e-1".split()
    found = Settings.from_command_line([*required, *more])
    assert found.lr_of == (("a.*", 0.1), ("b", 2.0), ("c=d", 0.1))
    for wrong in ("a", "=2", "a=0", "a=x"):
        with pytest.raises(SettingsError, match="argument --lr-of"):
            Settings.from_command_line([*required, "--lr-of", wrong])


def moves(options):
    """By how much the first step moves the parameters of each kind, at most."""
    settings = Settings(**options)
    job = prepare(settings, CPU)
    trainer = Trainer(settings, build_model(settings, job, CPU), CPU, job.bound)
    before = {name: full(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    group = dist.new_group(backend="gloo")
    with Loader(job.reading, job.rows, job.images, job.config, job.bound, group) as batches:
        trainer.step(next(iter(batches)))
    found = {True: 0.0, False: 0.0}
    for name, p in trainer.model.named_parameters():
        moved = float((full(p.detach()) - before[name]).abs().max())
        found["visual" in name] = max(found["visual" in name], moved)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("rates"))


def test_a_part_moves_at_its_own_rate(ranks, folder, tmp_path):
    lr_of = (("model.visual.*", 0.25),)
    given = options(folder, plan="plans/baseline_dp.py", lr_of=lr_of, weight_decay=0.0, warmup=0)
    given |= {"schedule": "constant", "steps": 1}
    for found in ranks(2).run(moves, given, timeout=60):  # AdamW's first step is the rate
        assert found[False] == pytest.approx(2e-3, rel=1e-3)
        assert found[True] == pytest.approx(5e-4, rel=1e-3)
    metrics = tmp_path / "metrics.jsonl"
    assert ranks(2).run(run_train, given | {"metrics": metrics}, timeout=60) == [0, 0]
    assert [line["lrs"] for line in read_metrics(metrics)] == [{"model.visual.*": 5e-4}]


def gradients(options):
    """Raw gradients of one step, and what this rank hands to reductions of gradients [bytes]."""
    settings = Settings(**options)
    job = prepare(settings, CPU)
    trainer = Trainer(settings, build_model(settings, job, CPU), CPU, job.bound)
    sent, call = [], GlooReduceScatter.__call__

    def counted(self, output_tensor, input_tensor, *args, **kwargs):
        sent.append(input_tensor.nbytes)
        return call(self, output_tensor, input_tensor, *args, **kwargs)

    group = dist.new_group(backend="gloo")
    GlooReduceScatter.__call__ = counted
    try:
        with Loader(job.reading, job.rows, job.images, job.config, job.bound, group) as batches:
            result = trainer.step(next(iter(batches)))
    finally:
        GlooReduceScatter.__call__ = call
    found = {
        name: None if p.grad is None else full(p.grad).clone()
        for name, p in trainer.model.named_parameters()
    }
    return found, sum(sent), result.loss, result.norm


FROZEN = ("model.language_model.*", "lm_head.*")


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        ("vision_cp_ulysses", {}),
        ("baseline_dp", {"freeze": FROZEN}),
        ("baseline_dp", {"dtype": "bfloat16"}),
    ],
)
def test_reducing_once_gives_the_same_gradients(ranks, folder, tmp_path, plan, changes):
    sizes = [[(16, 24)], [(8, 16)], [], [(8, 8)], [], []]  # two micro-batches, and one of text
    write_rows(tmp_path, sizes)
    given = options(folder, plan=f"plans/{plan}.py", data=tmp_path / "rows.jsonl", clip=0.0)
    given |= {"batch": 6, "micro_batch": 1, "steps": 1} | changes
    every, last = (
        ranks(2).run(gradients, given | {"reduce": kind}, timeout=60)[0]
        for kind in ("every", "last")
    )
    assert last[2:] == pytest.approx(every[2:], rel=1e-5)
    assert last[1] < every[1] / 1.9
    rtol = 1e-5 if "dtype" not in changes else 1e-2
    for name, gradient in every[0].items():
        assert (gradient is None) == (last[0][name] is None), name
        if gradient is not None:
            scale = float(gradient.norm())
            assert float((gradient - last[0][name]).norm()) <= rtol * scale + 1e-6, name
