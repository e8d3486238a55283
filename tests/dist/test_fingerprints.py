"""What ranks were given otherwise is told by all of them, before anything else is sent."""

import json
import re
import shutil

import pytest
import torch
import torch.distributed as dist

from model.config import load_config
from model.data.sample import IGNORED
from model.checkpoint.facts import file_facts
from model.training.job import prepare
from model.training.settings import Settings
from tests.hf_oracle import hf_model
from tests.tiny import tiny_raw
from vlshard import ShardError, load_plan
from vlshard.comm import fingerprint, refuse_differences
from vlshard.comm.fingerprints import differences, ranks_text

FIX = "\n  fix: give every rank the same command line, plan and files"
GIVEN = "ranks were not given the same\n  "
BOUND = "ranks have bound different plans\n  "
PLAN = """
import torch.distributed as dist
from vlshard import Mesh, Plan, fsdp, gather, replicate, ulysses

def plan(world):
    layouts = {"vision.patches": "(img@dp.home s)@cp c", "text.tokens": "b@dp.home s@cp.zigzag m"}
    fields = dict(
        mesh=Mesh(dp=1, cp=2),
        params={"**": fsdp("dp cp")},
        layouts=layouts,
        attention={"vision": gather("cp"), "text": gather("cp")},
    )
    if dist.get_rank() == 1:
        CHANGE
    return Plan(**fields)
"""
CHANGES = {  # what rank 1 does to its plan, and the lines that say so
    "fields['mesh'] = Mesh(dp=2, cp=1)": ["mesh: dp=1 cp=2 on rank 0; dp=2 cp=1 on rank 1"],
    "fields['params'] = {'**': replicate()}": [
        "stored as fsdp('dp cp'): 15 units, # on rank 0; nothing on rank 1",
        "stored as replicate(): nothing on rank 0; 15 units, # on rank 1",
    ],
    "layouts['vision.patches'] = '(img@dp.home s@cp) c'": [
        "vision.patches: (img@dp.home s)@cp c on rank 0; (img@dp.home s@cp) c on rank 1"
    ],
    "layouts['vision.patches'] = '(img@(dp cp).balance s) c'": [
        "vision.patches: (img@dp.home s)@cp c on rank 0; (img@(dp cp).balance s) c on rank 1"
    ],
    "layouts['text.tokens'] = 'b@dp.home s@cp m'": [
        "text.tokens: b@dp.home s@cp.zigzag m on rank 0; b@dp.home s@cp m on rank 1"
    ],
    "fields['attention'] = {'vision': ulysses('cp'), 'text': gather('cp')}": [
        "attention of vision: gather('cp') on rank 0; ulysses('cp') on rank 1"
    ],
    "fields['attention']['text'] = gather('cp', overlap=True)": [
        "attention of text: gather('cp') on rank 0; gather('cp', overlap=True) on rank 1"
    ],
    "fields['checkpoint'] = {'text': 2}": ["checkpoint of text: nothing on rank 0; 2 on rank 1"],
    "fields['cost'] = (1.0, 2.0)": ["cost of a frame: # on rank 0; [1.0, 2.0] on rank 1"],
}
OPTIONS = {
    "lr": (1e-5, 2e-3, "--lr: 1e-05 on rank 0; 0.002 on rank 1"),
    "seed": (0, 1, "--seed: 0 on rank 0; 1 on rank 1"),
    "batch": (2, 4, "--batch: 2 on rank 0; 4 on rank 1"),
    "steps": (2, 3, "--steps: 2 on rank 0; 3 on rank 1"),
    "micro_batch": (None, 1, "--micro-batch: null on rank 0; 1 on rank 1"),
    "pack": (False, True, "--pack: false on rank 0; true on rank 1"),
    "shuffle": (True, False, "--shuffle: true on rank 0; false on rank 1"),
    "dtype": ("float32", "bfloat16", "--dtype: float32 on rank 0; bfloat16 on rank 1"),
    "freeze": ((), ("lm_head*",), '--freeze: [] on rank 0; ["lm_head*"] on rank 1'),
    "measure_cost": (False, True, "--measure-cost: false on rank 0; true on rank 1"),
}


def write_rows(path, rows):
    with path.open("w") as file:
        for row in rows:
            ids = [3 + row, 5, 7 + row, 9]
            file.write(json.dumps({"input_ids": ids, "labels": [IGNORED, *ids[1:]]}) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, the same with one thing changed each, files of rows, and plans."""
    path = tmp_path_factory.mktemp("given")
    hf_model(tiny_raw(), seed=1).save_pretrained(path / "model")
    (path / "model" / "tokenizer_config.json").write_text("{}")
    for name in ("eps", "other", "tokens", "fresh"):
        shutil.copytree(path / "model", path / name)
    raw = json.loads((path / "eps" / "config.json").read_text())
    raw["text_config"]["rms_norm_eps"] = 1e-5
    (path / "eps" / "config.json").write_text(json.dumps(raw))
    hf_model(tiny_raw(), seed=2).save_pretrained(path / "other")
    (path / "tokens" / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    (path / "fresh" / "model.safetensors").unlink()
    write_rows(path / "rows.jsonl", range(8))
    write_rows(path / "ids.jsonl", range(1, 9))
    write_rows(path / "fewer.jsonl", range(6))
    write_rows(path / "turned.jsonl", [1, 0, *range(2, 8)])
    for k, change in enumerate(["pass", "layouts['text.tokens'] = 'b s@xp m'", *CHANGES]):
        (path / f"plan{k}.py").write_text(PLAN.replace("CHANGE", change))
    return path


def told(path, cases):
    """What is raised for each case, of which rank 1 has something else."""
    found = []
    same = {"plan": path / "plan0.py", "model": "model", "data": "rows.jsonl"}
    for other in cases:
        mine = {"steps": 2, "batch": 2, **same, **(other if dist.get_rank() == 1 else {})}
        paths = {name: path / mine[name] for name in ("model", "data")}
        try:
            prepare(Settings(**{**mine, **paths, "plan": str(mine["plan"])}), torch.device("cpu"))
            found.append(None)
        except ShardError as error:
            found.append(str(error))
    dist.barrier()
    return found


def masked(text):
    """Without checksums, lists of units and the model's own cost of a frame."""
    for pattern in (r"(?<=checksum )\w+", r"(?<=units, ).*?(?= on rank)", r"(?<=frame: ).*?(?= on)"):
        text = re.sub(pattern, "#", text)
    return text


def test_ranks_that_have_the_same_go_on(ranks, folder):
    assert ranks(2).run(told, folder, [{}]) == [[None]] * 2


def test_another_option_on_one_rank_is_told(ranks, folder):
    cases = [{name: other} for name, (_, other, _) in OPTIONS.items()]
    first, second = ranks(2).run(told, folder, cases)
    assert first == second == [GIVEN + line + FIX for *_, line in OPTIONS.values()]


def test_other_files_on_one_rank_are_told(ranks, folder):
    cases = {
        "ids.jsonl": ["rows: 8, checksum # on rank 0; 8, checksum # on rank 1"],
        "fewer.jsonl": ["rows: 8, checksum # on rank 0; 6, checksum # on rank 1"],
        "turned.jsonl": ["rows: 8, checksum # on rank 0; 8, checksum # on rank 1"],
        "eps": ["config text.rms_norm_eps: 1e-06 on rank 0; 1e-05 on rank 1"],
        "other": ["model.safetensors: SIZE bytes, checksum # on rank 0; SIZE bytes, checksum # on"],
        "tokens": ["tokenizer_config.json: checksum # on rank 0; checksum # on rank 1"],
        "fresh": [
            "weights: loaded on rank 0; none, so new ones are made on rank 1",
            "model.safetensors: SIZE bytes, checksum # on rank 0; nothing on rank 1",
        ],
    }
    size = (folder / "model" / "model.safetensors").stat().st_size
    other = [{"data" if "." in name else "model": name} for name in cases]
    first, second = ranks(2).run(told, folder, other)
    assert first == second
    for found, lines in zip(first, cases.values(), strict=True):
        assert found.startswith(GIVEN)
        for line in lines:
            assert line.replace("SIZE", str(size)) in masked(found)


def test_another_plan_on_one_rank_is_told_before_groups_are_made(ranks, folder):
    cases = [{"plan": folder / f"plan{k + 2}.py"} for k in range(len(CHANGES))]
    first, second = ranks(2).run(told, folder, cases)
    assert first == second
    for found, lines in zip(first, CHANGES.values(), strict=True):
        assert masked(found) == BOUND + "\n  ".join(lines) + FIX


def test_a_plan_that_does_not_fit_on_one_rank_is_told_by_all(ranks, folder):
    (first,), (second,) = ranks(2).run(told, folder, [{"plan": folder / "plan1.py"}])
    assert first == second
    assert first.startswith("unknown mesh axis 'xp'")


def bound(path):
    """A library's user binds a plan that reads its rank, in a time that a test can wait."""
    plan = load_plan(str(path / "plan8.py"), 2)
    with pytest.raises(ShardError) as error:
        plan.bind(load_config(path / "model"), 2)
    return str(error.value)


def test_a_plan_bound_by_hand_is_compared_too(ranks, folder):
    first, second = ranks(2).run(bound, folder, timeout=20)
    assert first == second
    assert first.startswith(BOUND + "attention of text: gather('cp') on rank 0; ")


def compared(world):
    """Values of any kind and length; faults before differences."""
    rank, found = dist.get_rank(), []
    long = "x" * 1000 + str(rank == 2)
    for mine, fault in (
        ({"a": 1, "b": None, "c": [1, "two"], "d": 0.5}, None),
        ({"a": rank // 2}, None),
        ({"a": long}, None),
        ({"a": 1, **({"b": "\n2"} if rank == 3 else {})}, None),
        ({f"name{i}": rank for i in range(20)}, None),
        ({"a": rank}, "this file\nis broken" if rank == 1 else None),
        ({}, "as everywhere"),
    ):
        try:
            refuse_differences(mine, fault=fault, headline="ranks differ", fix="fix: do not")
            found.append(None)
        except ShardError as error:
            found.append(str(error))
    return found


def test_differences_name_values_and_ranks(ranks):
    first, *others = ranks(4).run(compared, 4)
    assert all(found == first for found in others)
    same, pairs, long, missing, many, fault, everywhere = first
    assert same is None
    assert pairs == "ranks differ\n  a: 0 on ranks 0 to 1; 1 on ranks 2 to 3\n  fix: do not"
    assert len(long) < 300
    assert re.search(r"a: x{72}\.\.\. \(\w{16}\) on ranks 0 to 1, 3; x{72}", long)
    assert "b: nothing on ranks 0 to 2; 2 on rank 3" in missing
    assert "name7: 0 on rank 0; 1 on rank 1; 2 on rank 2; 3 on rank 3\n  ... and 12 more" in many
    assert fault == "this file\nis broken"
    assert everywhere == "as everywhere"


def test_ranks_in_words_and_checksums_of_parts():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 2, 3, 4, 7]) == "ranks 0, 2 to 4, 7"
    assert ranks_text(range(0, 40, 2)).endswith("14, ...")
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint(b"ab") == fingerprint("ab")
    assert differences([{}, {}]) == []
    assert differences([{"a": str(i)} for i in range(6)])[0].endswith("2 other values")


def test_weights_are_told_apart_by_size_header_and_blocks(tmp_path):
    """A block is 4 KiB, 64 of them lie evenly over a file; what lies between is not read."""
    path, size = tmp_path / "weights", 2_000_000
    data = bytearray((16).to_bytes(8, "little") + b"h" * 16 + bytes(size))

    def facts(place=None):
        found = bytearray(data)
        if place is not None:
            found[place] ^= 1
        path.write_bytes(found)
        return file_facts(path)

    same = facts()
    step = (len(data) - 4096) / 63
    for place in (9, 23, 24, 4095, len(data) - 1, int(step) + 1, int(40 * step) + 4000):
        assert facts(place) != same, place
    assert facts(int(step) + 4096 + 100) == same
    path.write_bytes(data + b"\0")
    assert file_facts(path) != same
