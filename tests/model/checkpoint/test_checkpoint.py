"""Reading and writing Hugging Face folders, with transformers on the other side."""

import copy
import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from model.checkpoint.folder import check_checkpoint
from model.checkpoint.headers import CheckpointError, has_weights
from model.checkpoint.place import check_target
from model.checkpoint.save_load import load_checkpoint, save_checkpoint
from model.config.config import Config, load_config
from tests.tables import CONFIG, RAW

EXPERTS = ".mlp.experts."
GATE_UP = "model.language_model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.language_model.layers.0.mlp.experts.down_proj"
HEAD = "lm_head.weight"
NORM = "model.language_model.norm.weight"


def random_tensors(config=CONFIG, dtype=torch.float32):
    """Distinct values for every parameter."""
    draw = torch.Generator().manual_seed(0)
    shapes = config.parameter_shapes().items()
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes}


def zeros(config=CONFIG, dtype=torch.float32):
    return {n: torch.zeros(shape, dtype=dtype) for n, shape in config.parameter_shapes().items()}


def loaded(folder, config=CONFIG, **options):
    """What our reader makes of a folder."""
    tensors = zeros(config)
    load_checkpoint(tensors.items(), folder, config, **options)
    return tensors


def released(tensors):
    """The tensors as released checkpoints hold them."""
    return {n: x.mT.contiguous() if EXPERTS in n else x for n, x in tensors.items()}


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    assert all(got[n].dtype == x.dtype and torch.equal(got[n], x) for n, x in expected.items())


def folder_of(path, tensors, raw=RAW, files=None):
    """A folder, written by hand; ``files`` deals the tensors over files in turn."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    if files is None:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    places = {name: names[i % files] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: tensors[name] for name in tensors if places[name] == file}
        save_file(part, path / file, {"part": file})
    size = sum(x.numel() * x.itemsize for x in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def contents(folder):
    """Bytes of every file."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def reference(raw=RAW):
    torch.manual_seed(0)
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**copy.deepcopy(raw)))


def weights_of(model, config=CONFIG):
    return {n: x.detach() for n, x in model.state_dict().items() if n in config.parameter_shapes()}


@pytest.mark.parametrize("shard", ["5GB", "60KB"])
def test_what_transformers_writes_is_read(tmp_path, shard):
    model = reference()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard == "5GB"
    assert_equal(loaded(tmp_path, load_config(tmp_path)), weights_of(model))


def test_released_layout_is_read(tmp_path):
    tensors = random_tensors()
    assert released(tensors)[GATE_UP].shape == (8, 64, 48)
    assert released(tensors)[DOWN].shape == (8, 24, 64)
    assert_equal(loaded(folder_of(tmp_path, released(tensors))), tensors)


@pytest.mark.parametrize("auto", [Qwen3VLMoeForConditionalGeneration, AutoModelForImageTextToText])
@pytest.mark.parametrize("shard_bytes", [10**9, 200_000])
def test_a_new_folder_is_read_by_transformers(tmp_path, auto, shard_bytes):
    tensors, folder = random_tensors(), tmp_path / "export"
    save_checkpoint(tensors.items(), folder, CONFIG, shard_bytes=shard_bytes)
    assert (folder / "model.safetensors.index.json").exists() == (shard_bytes < 10**9)
    assert all(x.stat().st_size < shard_bytes + 9000 for x in folder.glob("model*"))
    model = auto.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert_equal(weights_of(model), tensors)
    assert_equal(loaded(folder), tensors)
    assert load_config(folder) == CONFIG


def test_a_new_folder_has_the_released_layout(tmp_path):
    tensors = random_tensors()
    save_checkpoint(tensors.items(), tmp_path / "export", CONFIG)
    assert_equal(load_file(tmp_path / "export" / "model.safetensors"), released(tensors))


def test_a_new_folder_can_be_transposed(tmp_path):
    tensors = random_tensors()
    save_checkpoint(tensors.items(), tmp_path / "export", CONFIG, expert_layout="transposed")
    assert_equal(load_file(tmp_path / "export" / "model.safetensors"), tensors)


@pytest.mark.parametrize("layout", [released, dict])
@pytest.mark.parametrize("files", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_bit_for_bit(tmp_path, layout, files, dtype):
    raw = RAW | {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    tensors = layout(random_tensors(dtype=dtype))
    source = folder_of(tmp_path / "source", tensors, raw, files)
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json"):
        (source / name).write_text(f"content of {name}")
    config = load_config(source)
    save_checkpoint(loaded(source).items(), tmp_path / "export", config, source=source)
    assert contents(tmp_path / "export") == contents(source)


@pytest.mark.parametrize("metadata", ["1", '"total_size"', "[]", "null"])
def test_an_index_of_odd_metadata_is_written_as_it_is(tmp_path, metadata):
    source = folder_of(tmp_path / "source", random_tensors(), files=3)
    path = source / "model.safetensors.index.json"
    places = json.loads(path.read_text())["weight_map"]
    path.write_text(f'{{"metadata": {metadata}, "weight_map": {json.dumps(places)}}}')
    save_checkpoint(random_tensors().items(), tmp_path / "new", CONFIG, source=source)
    assert (tmp_path / "new" / path.name).read_bytes() == path.read_bytes()


def test_each_dtype_of_the_source_is_kept(tmp_path):
    tensors = random_tensors() | {NORM: torch.full((64,), 0.1).bfloat16()}
    source = folder_of(tmp_path / "source", tensors)
    save_checkpoint(loaded(source).items(), tmp_path / "export", CONFIG, source=source)
    assert_equal(load_file(tmp_path / "export" / "model.safetensors"), tensors)
    assert "dtype" not in json.loads((tmp_path / "export" / "config.json").read_text())


def test_round_trip_of_a_folder_of_transformers(tmp_path):
    reference().save_pretrained(tmp_path / "source", max_shard_size="60KB")
    source, config = tmp_path / "source", load_config(tmp_path / "source")
    save_checkpoint(loaded(source, config).items(), tmp_path / "export", config, source=source)
    assert contents(tmp_path / "export") == contents(source)


def test_dtype_can_be_chosen(tmp_path):
    tensors = random_tensors()
    raw = copy.deepcopy(RAW) | {"dtype": "float32"}
    raw["text_config"]["dtype"] = "float32"
    source = folder_of(tmp_path / "source", released(tensors), raw, files=2)
    options = {"source": source, "dtype": torch.bfloat16}
    save_checkpoint(tensors.items(), tmp_path / "export", load_config(source), **options)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype="auto")
    assert_equal(weights_of(model), {n: x.bfloat16() for n, x in tensors.items()})
    written = load_config(tmp_path / "export").raw
    assert (written["dtype"], written["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * x.numel() for x in tensors.values())


def test_a_tied_head_is_stored_once(tmp_path):
    config = Config.from_dict(RAW | {"tie_word_embeddings": True})
    tensors = random_tensors(config)
    save_checkpoint(tensors.items(), tmp_path / "export", config)
    assert HEAD not in load_file(tmp_path / "export" / "model.safetensors")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "export")
    assert_equal(weights_of(model, config), tensors)
    embedding = tensors["model.language_model.embed_tokens.weight"]
    assert torch.equal(model.lm_head.weight, embedding)
    assert_equal(loaded(tmp_path / "export", config), tensors)


def test_parameters_take_their_own_dtype(tmp_path):
    tensors = random_tensors(dtype=torch.bfloat16)
    got = zeros(dtype=torch.float32)
    load_checkpoint(got.items(), folder_of(tmp_path, tensors), CONFIG)
    assert_equal(got, {n: x.float() for n, x in tensors.items()})


def square(hidden, inner):
    """A config of whose experts at least one matrix is square."""
    raw = copy.deepcopy(RAW)
    raw["text_config"] |= {"hidden_size": hidden, "moe_intermediate_size": inner}
    raw["vision_config"]["out_hidden_size"] = hidden
    return raw, Config.from_dict(raw)


@pytest.mark.parametrize(("hidden", "inner", "name"), [(32, 16, GATE_UP), (16, 16, DOWN)])
def test_square_experts_need_a_word(tmp_path, hidden, inner, name):
    raw, config = square(hidden, inner)
    tensors = random_tensors(config)
    for layout, stored in (("released", released(tensors)), ("transposed", tensors)):
        folder = folder_of(tmp_path / layout, stored, raw)
        with pytest.raises(CheckpointError) as error:
            check_checkpoint(folder, config)
        shape = list(tensors[name].shape)
        assert f"{name} has shape {shape} in both layouts of experts: say which one" in str(
            error.value
        )
        assert_equal(loaded(folder, config, expert_layout=layout), tensors)
        export = tmp_path / f"{layout} export"
        save_checkpoint(tensors.items(), export, config, source=folder, expert_layout=layout)
        assert_equal(load_file(export / "model.safetensors"), stored)


def test_a_layout_that_shapes_contradict_is_refused(tmp_path):
    folder = folder_of(tmp_path, random_tensors())
    with pytest.raises(CheckpointError, match="that is transposed, not released"):
        check_checkpoint(folder, CONFIG, "released")
    with pytest.raises(CheckpointError, match="'square': expected released or transposed"):
        check_checkpoint(folder, CONFIG, "square")


def test_all_faults_are_listed_before_any_tensor_is_read(tmp_path):
    config = Config.from_dict(RAW | {"tie_word_embeddings": True})
    tensors = random_tensors() | {
        NORM: torch.zeros(63),
        DOWN: torch.zeros(8, 3, 64),
        "model.extra": torch.zeros(2, 3),
        "model.visual.merger.norm.bias": torch.zeros(32, dtype=torch.int32),
    }
    del tensors["model.visual.pos_embed.weight"]
    folder, got = folder_of(tmp_path / "source", tensors), zeros(config)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(got.items(), folder, config)
    head, *lines = str(error.value).splitlines()
    assert head == f"{folder}: this checkpoint cannot be used"
    assert sorted(line.strip() for line in lines) == sorted(
        [
            "missing: model.visual.pos_embed.weight [36, 32]",
            "unexpected: lm_head.weight [104, 64] in model.safetensors "
            "(the head is tied to the embedding)",
            "unexpected: model.extra [2, 3] in model.safetensors",
            f"{NORM} has shape [63], expected [64]",
            f"{DOWN} has shape [8, 3, 64], expected [8, 64, 24] or [8, 24, 64]",
            "model.visual.merger.norm.bias has dtype I32, expected one of F64, F32, F16, BF16",
        ]
    )
    assert not any(x.any() for x in got.values())


def drop(folder, name):
    (folder / name).unlink()


def truncate(folder, name):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-100])


def garble(folder, name):
    (folder / name).write_bytes(b"\xff" * 64)


def repeat_key(folder, name):
    """Give the file a header in which a tensor occurs twice, with the same bytes."""
    whole = (folder / name).read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header = whole[8 : 8 + size].decode().rstrip()
    key, entry = next((k, v) for k, v in json.loads(header).items() if k != "__metadata__")
    doubled = (header[:-1] + "," + json.dumps({key: entry})[1:]).encode()
    doubled += b" " * (-len(doubled) % 8)
    (folder / name).write_bytes(struct.pack("<Q", len(doubled)) + doubled + whole[8 + size :])


def point(folder, to):
    """Let the index name another file for one tensor."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NORM] = to
    path.write_text(json.dumps(index))


def pipe(folder, name):
    """Put a pipe into the place of a file; opening it would wait for ever."""
    (folder / name).unlink()
    os.mkfifo(folder / name)


def rewrite_index(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)


SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("fault", "argument", "message"),
    [
        (drop, SHARD, f"{SHARD} is missing"),
        (truncate, SHARD, f"{SHARD} cannot be read"),
        (garble, SHARD, f"{SHARD} cannot be read"),
        (pipe, SHARD, f"{SHARD} cannot be read: found a pipe, expected a file"),
        (pipe, "model.safetensors.index.json", "cannot be read: found a pipe, expected a file"),
        (repeat_key, SHARD, f"{SHARD} cannot be read: duplicate keys: "),
        (point, "../x.safetensors", "names '../x.safetensors', no safetensors file of the folder"),
        (point, "/etc/x.safetensors", "names '/etc/x.safetensors', no safetensors file"),
        (point, "pytorch_model.bin", "names 'pytorch_model.bin', no safetensors file"),
        (point, SHARD, f"{NORM} is not in {SHARD}, where model.safetensors.index.json puts it"),
        (rewrite_index, "{", "model.safetensors.index.json cannot be read"),
        (rewrite_index, "[]", "model.safetensors.index.json cannot be read"),
        (rewrite_index, "[" * 100_000, "model.safetensors.index.json cannot be read"),
        (rewrite_index, '{"weight_map": {"a": 1}}', "does not map names of tensors to names of"),
        (rewrite_index, '{"weight_map": {}, "weight_map": {}}', "duplicate keys: weight_map"),
    ],
)
def test_broken_folders_are_refused(tmp_path, fault, argument, message):
    folder = folder_of(tmp_path / "source", random_tensors(), files=3)
    fault(folder, argument)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(zeros().items(), folder, CONFIG)
    assert message in str(error.value)
    assert "missing: " not in str(error.value)


@pytest.mark.parametrize("fault", [truncate, garble, repeat_key, pipe])
def test_broken_single_files_are_refused(tmp_path, fault):
    folder = folder_of(tmp_path / "source", random_tensors())
    fault(folder, "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_checkpoint(zeros().items(), folder, CONFIG)


def test_a_message_lists_some_faults_of_each_kind(tmp_path):
    extra = {f"{'x' * 100_000}{i}": torch.zeros(1) for i in range(20)}
    with pytest.raises(CheckpointError) as error:
        check_checkpoint(folder_of(tmp_path / "source", extra), CONFIG)
    lines = str(error.value).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        *["missing:"] * 12,
        "and",
        *["unexpected:"] * 12,
        "and",
    ]
    assert lines[-1] == "  and 8 more"
    assert max(map(len, lines)) < 500


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = folder_of(tmp_path / "source", random_tensors(), files=3)
    twice = load_file(folder / SHARD) | {NORM: torch.zeros(64)}
    save_file(twice, folder / SHARD)
    with pytest.raises(CheckpointError, match=f"{NORM} is in {SHARD}, where model"):
        check_checkpoint(folder, CONFIG)


def test_two_sets_of_weights_are_refused(tmp_path):
    folder = folder_of(tmp_path / "source", random_tensors(), files=3)
    save_file(random_tensors(), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="stands beside"):
        check_checkpoint(folder, CONFIG)


def test_pickles_are_never_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Exploding()))
    assert has_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is pickled, which is never"):
        load_checkpoint(zeros().items(), tmp_path, CONFIG)


class Exploding:
    """Whoever unpickles this fails."""

    def __reduce__(self):
        return pytest.fail, ("unpickled",)


def test_a_folder_without_weights_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert not has_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is neither model\.safetensors nor"):
        check_checkpoint(tmp_path, CONFIG)
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert has_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is named by no"):
        check_checkpoint(tmp_path, CONFIG)


def test_parameters_unlike_the_config_are_refused(tmp_path):
    tensors = random_tensors() | {"model.extra": torch.zeros(1), NORM: torch.zeros(63)}
    del tensors[HEAD]
    message = (
        "the model is not that of its config\n"
        f"  the model has no parameter {HEAD}\n"
        "  the model has a parameter model.extra\n"
        f"  {NORM} of the model is [63], expected [64]"
    )
    folder = folder_of(tmp_path / "source", random_tensors())
    for use in (load_checkpoint, save_checkpoint):
        with pytest.raises(CheckpointError) as error:
            use(tensors.items(), folder, CONFIG)
        assert str(error.value) == message


def test_parameters_without_storage_are_refused(tmp_path):
    folder = folder_of(tmp_path / "source", random_tensors())
    meta = {n: x.to("meta") for n, x in random_tensors().items()}
    with pytest.raises(ValueError, match="no storage to write to"):
        load_checkpoint(meta.items(), folder, CONFIG)


def test_an_older_export_is_replaced(tmp_path):
    folder = tmp_path / "export"
    save_checkpoint(random_tensors().items(), folder, CONFIG, shard_bytes=60_000)
    save_checkpoint(zeros().items(), folder, CONFIG)
    assert sorted(contents(folder)) == ["config.json", "model.safetensors"]
    assert_equal(loaded(folder), zeros())
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "deep" / "export").mkdir(parents=True)
    save_checkpoint(zeros().items(), tmp_path / "deep" / "export", CONFIG)
    assert_equal(loaded(tmp_path / "deep" / "export"), zeros())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["notes.txt"], "holds notes.txt, which no export writes: it is not replaced"),
        (["config.json", "src/"], "holds src, which no export writes"),
        (["vocab.json"], "is not empty and has no config.json"),
    ],
)
def test_other_folders_are_not_replaced(tmp_path, names, message):
    folder = tmp_path / "export"
    folder.mkdir()
    for name in names:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("{}")
    before = sorted(path.name for path in folder.iterdir())
    for refuse in (lambda: check_target(folder), lambda: save_to(folder)):
        with pytest.raises(CheckpointError) as error:
            refuse()
        assert message in str(error.value)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def save_to(folder):
    save_checkpoint(zeros().items(), folder, CONFIG)


def test_a_file_is_not_written_over(tmp_path):
    (tmp_path / "export").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a folder"):
        save_to(tmp_path / "export")
    assert (tmp_path / "export").read_text() == "mine"


@pytest.mark.parametrize(
    "stage", ["model.checkpoint.save_load.save_file", "model.checkpoint.export.shutil.copyfile"]
)
def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch, stage):
    source = folder_of(tmp_path / "source", random_tensors())
    (source / "tokenizer.json").write_text("{}")

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(stage, fail)
    with pytest.raises(CheckpointError, match="no space left on device"):
        save_checkpoint(random_tensors().items(), tmp_path / "export", CONFIG, source=source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_source_that_does_not_fit_is_refused(tmp_path):
    source = folder_of(tmp_path / "source", {"model.extra": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"unexpected: model\.extra"):
        save_checkpoint(random_tensors().items(), tmp_path / "export", CONFIG, source=source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_linked_files_are_read(tmp_path):
    folder = folder_of(tmp_path / "blobs", random_tensors())
    (tmp_path / "snapshot").mkdir()
    for path in folder.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert_equal(loaded(tmp_path / "snapshot"), random_tensors())
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError):
        loaded(tmp_path / "snapshot")
