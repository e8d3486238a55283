"""Tensors saved under one plan and loaded under others: every element, by its global index."""

from functools import cache

import pytest
import torch

from model.config.config import Config
from model.modules.shards import write_block
from tests.dist.test_splits import PLANS, SEED, raw, write_plan
from tests.plan_names import MAIN_PLANS, OTHER_PLANS, SPLIT_PLANS
from tests.training import Run
from vlshard.comm import AgreedError
from vlshard.storage import Key, held_entries, load_tensors, local_part, save_tensors
from vlshard.storage.rectangles import stored_rectangles

KINDS = ("", ".exp_avg", ".exp_avg_sq")


def tensors_of(run, config, seed):
    """Parameters and two more of each shape, with values that tell tensor and place."""
    found, shapes = {}, config.parameter_shapes()
    for name, parameter in run.model.named_parameters():
        for kind in KINDS:
            values = torch.zeros_like(parameter.detach())
            whole = value_of(Key(name, kind), shapes[name], seed)
            write_block(name, values, whole.__getitem__, run.parts)
            found[Key(name, kind)] = values
    return found


@cache
def value_of(key, shape, seed):
    draw = torch.Generator().manual_seed(hash_of(f"{seed} {key.name}{key.kind}"))
    return torch.randn(shape, generator=draw)


def hash_of(text):
    return sum((i + 1) * byte for i, byte in enumerate(text.encode()))


def save_under(path, raw, folder):
    config = Config.from_dict(raw)
    run = Run(config, path, seed=SEED)
    held = held_entries(tensors_of(run, config, 1), run.parts, run.bound.fused)
    return save_tensors(held, folder)


def load_under(path, raw, folders):
    """Names that are not as they were saved, after each load."""
    config, wrong = Config.from_dict(raw), []
    shapes = config.parameter_shapes()
    run = Run(config, path, seed=SEED)
    for folder in folders:
        tensors = tensors_of(run, config, 2)
        load_tensors(tensors, folder, parts=run.parts, fused=run.bound.fused)
        for key, tensor in tensors.items():
            whole = value_of(key, shapes[key.name], 1)
            for here, there in stored_rectangles(key.name, tensor, run.parts):
                if not torch.equal(local_part(tensor)[here], whole[there]):
                    wrong.append(f"{folder} {key}")
    return wrong


# Plans by ranks: shipped ones, and splits that cut fused dims, two axes, unevenly, or overlap.
SHIPPED = {
    1: ("single",),
    2: (*MAIN_PLANS, *(name for name, ranks in {**OTHER_PLANS, **SPLIT_PLANS}.items() if ranks == 2)),
    4: ("baseline_dp", *(n for n, ranks in {**OTHER_PLANS, **SPLIT_PLANS}.items() if ranks == 4)),
}
QUICK = {1: ("single",), 2: ("vision_dp1",), 4: ("vision_hsdp", "decoder_tp_cp")}
SPLIT = [
    (2, "vision and text, both cut"),
    (4, "two axes, joined"),
    (4, "tp4, 2 key heads"),
    (4, "tp2 dp2, sharded over tp, copied over dp"),
]
QUICK_LOADS = ("single", SPLIT[0][1], SPLIT[2][1])


def plans_of(world, folder, thorough):
    paths = {name: f"plans/{name}.py" for name in (SHIPPED if thorough else QUICK)[world]}
    for i, key in enumerate(key for key in SPLIT if key[0] == world):
        paths[key[1]] = write_plan(folder / f"split{world}{i}.py", key)
    return paths


def small(thorough):
    """Two layers of the decoder in place of four, one vision block."""
    found = raw()
    if not thorough:
        found["text_config"] |= {"num_hidden_layers": 2, "mlp_only_layers": [1]}
        found["vision_config"] |= {"depth": 1, "deepstack_visual_indexes": [0]}
    return found


def test_every_plan_loads_what_every_plan_saved(ranks, tmp_path, request):
    """All shipped plans with ``--all-pairs``, else some."""
    thorough = request.config.getoption("all_pairs")
    plans = {world: plans_of(world, tmp_path, thorough) for world in (1, 2, 4)}
    folders, model = [], small(thorough)
    for world, paths in plans.items():
        for name, path in paths.items():
            folders.append(str(tmp_path / f"{world} {name}"))
            found = ranks(world).run(save_under, path, model, folders[-1], timeout=120)
            assert all(facts == found[0] for facts in found)
            assert found[0].keys() == {p.name for p in (tmp_path / folders[-1]).iterdir()}
    for world, paths in plans.items():
        for name, path in paths.items():
            if thorough or name in QUICK_LOADS:
                wrong = ranks(world).run(load_under, path, model, folders, timeout=240)
                assert wrong == [[]] * world, path


def errors_of(path, raw, folder, change):
    """The error of loading something else than was saved."""
    config = Config.from_dict(raw)
    run = Run(config, path, seed=SEED)
    tensors = {key: x for key, x in tensors_of(run, config, 2).items() if not key.kind}
    spare = {Key(key.name, kind) for key in tensors for kind in KINDS}
    if change == "missing":
        tensors[Key("new.weight", ".exp_avg")] = torch.zeros(3)
    elif change == "unexpected":
        spare = {key for key in spare if key != Key("lm_head.weight", ".exp_avg")}
    elif change == "dtype":
        tensors[Key("lm_head.weight")] = torch.zeros(config.parameter_shapes()["lm_head.weight"]).bfloat16()
    elif change == "shape":
        tensors[Key("lm_head.weight")] = torch.zeros(3, 4)
    try:
        load_tensors(tensors, folder, parts=run.parts, fused=run.bound.fused, spare=spare)
    except AgreedError as error:
        return str(error)


FAULTS = {
    "missing": "missing: new.weight.exp_avg",
    "unexpected": "unexpected: lm_head.weight.exp_avg",
    "dtype": "lm_head.weight is torch.float32, expected torch.bfloat16",
    "shape": "lm_head.weight: part lm_head.weight/0 has shape [96, 64], expected [3, 4]",
}


def test_what_does_not_fit_is_named_on_every_rank(ranks, tmp_path):
    folder = str(tmp_path / "saved")
    ranks(2).run(save_under, "plans/baseline_dp.py", small(False), folder, timeout=120)
    for change, text in FAULTS.items():
        found = ranks(2).run(errors_of, "plans/baseline_dp.py", small(False), folder, change)
        assert found == [f"{folder} does not fit\n  {text}"] * 2


def fail_to_save(path, raw, folder, rank):
    """The error of a save in which one rank cannot write."""
    config = Config.from_dict(raw)
    run = Run(config, path, seed=SEED)
    held = held_entries(tensors_of(run, config, 1), run.parts, run.bound.fused)
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == rank:
            patch.setattr("vlshard.storage.saved._Noted.write", full_disk)
        try:
            save_tensors(held, folder)
        except AgreedError as error:
            return str(error)


def full_disk(self, data):
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_is_named_on_every_rank(ranks, tmp_path):
    folder = str(tmp_path / "saved")
    found = ranks(2).run(fail_to_save, "plans/baseline_dp.py", small(False), folder, 1)
    text = f"{folder} cannot be written\n  rank 1: No space left on device"
    assert found == [text] * 2
