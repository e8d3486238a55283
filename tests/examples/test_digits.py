import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from examples.digits import draw_noise, main, write_data
from examples.read_digits import Reader, score, stand_alone
from model.config.config import load_config
from model.data.images import ImageReader
from model.data.rows import RowFile

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data set with few rows."""
    out = tmp_path_factory.mktemp("digits") / "data"
    write_data(out, seed=3, train_rows=50, heldout_rows=24, variants=1)
    return out


@pytest.fixture(scope="module")
def export(data):
    """The model, with random weights, as transformers saves it."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(data / "model")
    model = AutoModelForImageTextToText.from_config(config)
    target = data / "export"
    model.save_pretrained(target)
    for file in (data / "model").iterdir():
        if file.name != "config.json":
            (target / file.name).write_bytes(file.read_bytes())
    return target


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def opened(path):
    with Image.open(path) as image:
        return image.copy()


def scans_in(folder):
    return {re.match(r"scan(\d{4})-", path.name)[1] for path in folder.iterdir()}


def test_training_and_held_out_scans_share_nothing(data):
    train, heldout = (scans_in(data / "images" / kind) for kind in ("train", "heldout"))
    assert len(train) == 1437
    assert not train & heldout
    rows = {kind: rows_of(data / f"{kind}.jsonl") for kind in ("train", "heldout", "noise")}
    assert {kind: len(found) for kind, found in rows.items()} == {
        "train": 50,
        "heldout": 24,
        "noise": 24,
    }
    for kind, found in rows.items():
        assert {name.split("/")[1] for row in found for name in row["images"]} == {kind}


def test_enough_rows_use_all_held_out_scans(tmp_path):
    write_data(tmp_path / "a", train_rows=1, heldout_rows=300, variants=1)
    assert len(scans_in(tmp_path / "a" / "images" / "heldout")) == 360


@pytest.mark.parametrize("kind", ["train", "heldout", "noise"])
def test_rows_ask_for_the_digits_of_their_scans(data, kind):
    targets = load_digits().target
    rows = rows_of(data / f"{kind}.jsonl")
    assert {len(row["images"]) for row in rows} == {1, 2, 3, 4}
    for row in rows:
        question, answer = row["messages"]
        scans = [int(re.search(r"scan(\d{4})-", name)[1]) for name in row["images"]]
        assert answer == {"role": "assistant", "content": "".join(str(targets[s]) for s in scans)}
        assert question == {"role": "user", "content": "<image>" * len(scans) + "Read the digits."}
        assert all((data / name).is_file() for name in row["images"])


def test_images_have_several_sizes_and_noise_has_the_same(data):
    sizes = {opened(path).size for path in (data / "images" / "train").iterdir()}
    assert sizes == {(32, 32), (32, 64), (64, 32), (64, 64)}
    for path in (data / "images" / "heldout").iterdir():
        scan, noise = opened(path), opened(data / "images" / "noise" / path.name)
        assert scan.size == noise.size
        assert np.corrcoef(np.ravel(scan), np.ravel(noise))[0, 1] < 0.3


def test_noise_is_even_and_without_pattern():
    noise = np.asarray(draw_noise((64, 64), np.random.default_rng(0)), dtype=float)
    assert abs(noise.mean() - 127.5) < 5
    assert abs(np.corrcoef(np.ravel(noise[1:]), np.ravel(noise[:-1]))[0, 1]) < 0.05


@pytest.mark.parametrize(("kind", "nearest"), [("train", 0.02), ("heldout", 0.001)])
def test_drawings_are_like_their_scans(data, kind, nearest):
    """Brought back to 8x8, a drawing is nearer to its own scan than to nearly all others."""
    flat = load_digits().images.reshape(-1, 64)
    flat = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    nearer = []
    for path in sorted((data / "images" / kind).iterdir())[:300]:
        image = opened(path)
        if image.size[0] == image.size[1]:
            small = np.ravel(image.resize((8, 8), Image.Resampling.BOX)).astype(float)
            likeness = flat @ (small / np.linalg.norm(small))
            nearer.append(np.mean(likeness > likeness[int(path.name[4:8])]))
    assert np.median(nearer) < nearest


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and "export" not in path.parts)
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_the_same_seed_writes_the_same_bytes(data, tmp_path):
    write_data(tmp_path / "a", seed=3, train_rows=50, heldout_rows=24, variants=1)
    write_data(tmp_path / "b", seed=4, train_rows=50, heldout_rows=24, variants=1)
    assert contents(tmp_path / "a") == contents(data)
    assert scans_in(tmp_path / "b" / "images" / "train") != scans_in(data / "images" / "train")
    for kind in ("train", "heldout"):
        assert (tmp_path / "b" / f"{kind}.jsonl").read_text() != (
            data / f"{kind}.jsonl"
        ).read_text()


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    assert f"{tmp_path} is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_model_folder_is_one_of_transformers(data):
    theirs, ours = AutoConfig.from_pretrained(data / "model"), load_config(data / "model")
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    assert theirs.model_type == "qwen3_vl_moe"
    assert theirs.text_config.rope_parameters["mrope_section"] == list(ours.text.mrope_section)
    assert theirs.text_config.initializer_range == ours.vision.initializer_range == 0.08
    for name, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        assert (
            tokenizer.convert_tokens_to_ids(token) == getattr(ours, name) == getattr(theirs, name)
        )
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer) <= ours.text.vocab_size
    text = "<|im_start|>user\nWas ist 1024? 漢字 \U0001f600<|im_end|>\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("907") == ["9", "0", "7"]


def test_rows_learn_the_digits_and_the_end_of_the_turn(data):
    config, tokenizer = load_config(data / "model"), AutoTokenizer.from_pretrained(data / "model")
    images = ImageReader(data / "model", config)
    file = RowFile(data / "train.jsonl", data / "model", config, images)
    for i, row in enumerate(rows_of(data / "train.jsonl")):
        sample, paths = file.row(i)
        learned = sample.labels[sample.labels != -100]
        assert tokenizer.decode(learned) == row["messages"][1]["content"] + "<|im_end|>"
        assert [path.relative_to(data).as_posix() for path in paths] == row["images"]
        sizes = [opened(path).size for path in paths]
        assert sample.grids == tuple((1, height // 16, width // 16) for width, height in sizes)


def test_score_counts_answers_and_digits_in_their_place():
    found = score(["12", "345", "6", "78"], ["12", "354", "", "788"])
    assert found == {"exact_match": 1 / 4, "digits_right": 5 / 8}


def test_answers_do_not_depend_on_the_batch(data, export):
    reader, rows = Reader(export), rows_of(data / "heldout.jsonl")[:6]
    together = reader.answer(rows, data)
    assert together == [reader.answer([row], data)[0] for row in rows]
    assert len(set(together)) > 1


def test_reading_is_a_process_that_knows_transformers_only(data, export, tmp_path):
    script = [sys.executable, "-I", str(ROOT / "examples" / "read_digits.py")]
    files = ["--data", str(data / "heldout.jsonl"), "--noise", str(data / "noise.jsonl")]
    command = [*script, "--model", str(export), *files, "--out", str(tmp_path / "out.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert {kind: figures["examples"] for kind, figures in found.items()} == {
        "heldout": 24,
        "noise": 24,
    }
    assert found["heldout"]["exact_match"] < 0.3
    assert "heldout: 24 examples, exact match 0." in run.stdout


def test_reading_refuses_to_run_beside_the_project():
    with pytest.raises(AssertionError, match="vlshard is imported already"):
        stand_alone()
