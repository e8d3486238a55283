import json
import os
import subprocess
import sys
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from examples.digits_model import write_model
from model.config.config import load_config
from model.data.images import ImageReader
from model.data.rows import RowError, RowFile


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder, beside images of 1, 2 and 4 visual tokens."""
    base = tmp_path_factory.mktemp("rows")
    write_model(base / "model")
    for name, size in (("one", (32, 32)), ("two", (64, 32)), ("four", (64, 64))):
        Image.new("L", size).save(base / f"{name}.png")
    (base / "text.png").write_text("no image")
    return base / "model"


@pytest.fixture(scope="module")
def config(folder):
    return load_config(folder)


@pytest.fixture(scope="module")
def tokens(folder):
    """Token ids of a text, by the folder's tokenizer."""
    return lambda text: AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


@pytest.fixture
def rows(folder, config, request):
    """Makes a RowFile of rows or of raw bytes, beside the images."""

    def make(*rows, model=folder):
        path = folder.parent / f"{request.node.name.replace('/', '_')[:60]}.jsonl"
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"\n".join(lines))
        return RowFile(path, model, config, ImageReader(model, config))

    return make


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def chat(*messages, images=()):
    return {"messages": list(messages), "images": list(images)}


def test_chat_row_learns_answers_and_the_ends_of_their_turns(rows, tokens):
    row = chat(
        {"role": "system", "content": "Be brief."},
        user("<image>Read<image>"),
        assistant("31"),
        user("Again."),
        assistant("3 1"),
        images=["two.png", "one.png"],
    )
    sample, paths = rows(row).row(0)
    start, pad, end = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
    pieces = [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", False),
        (f"{start}{pad}{pad}{end}Read{start}{pad}{end}<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        ("31<|im_end|>", True),
        ("\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n", False),
        ("3 1<|im_end|>", True),
        ("\n", False),
    ]
    ids = [(i, learned) for text, learned in pieces for i in tokens(text)]
    assert sample.ids.tolist() == [i for i, _ in ids]
    assert sample.labels.tolist() == [i if learned else -100 for i, learned in ids]
    assert sample.grids == ((1, 2, 4), (1, 2, 2))
    assert [path.name for path in paths] == ["two.png", "one.png"]
    assert all(path.is_file() for path in paths)


def test_images_in_an_answer_are_not_learned(rows, tokens, config):
    sample, _ = rows(chat(user("Show"), assistant("<image>7"), images=["four.png"])).row(0)
    learned = sample.labels[sample.labels != -100].tolist()
    assert learned == tokens("<|vision_start|><|vision_end|>7<|im_end|>")
    assert np.count_nonzero(sample.ids == config.image_token_id) == 4


def test_text_of_any_kind_is_taken_apart_as_the_tokenizer_does(rows, tokens):
    answer = "a  çñ 漢字 \U0001f600 e\u0301 <b>\t1000\n"
    sample, _ = rows({"messages": [user("Say"), assistant(answer)]}).row(0)
    before = "<|im_start|>user\nSay<|im_end|>\n<|im_start|>assistant\n"
    assert sample.ids.tolist() == tokens(before + answer + "<|im_end|>\n")
    learned = sample.labels[sample.labels != -100].tolist()
    assert learned == tokens(answer + "<|im_end|>")


def test_pretokenised_row_is_taken_as_it_is(rows, config):
    pad = config.image_token_id
    ids, labels = [5, pad, pad, 7, pad, 9], [1, -100, -100, 7, -100, 300]
    row = {"input_ids": ids, "labels": labels, "images": ["two.png", "one.png"]}
    sample, paths = rows(row).row(0)
    assert (sample.ids.tolist(), sample.labels.tolist()) == (ids, labels)
    assert sample.grids == ((1, 2, 4), (1, 2, 2))
    assert [path.name for path in paths] == ["two.png", "one.png"]


def test_pretokenised_row_may_have_no_label_and_no_image(rows):
    sample, paths = rows({"input_ids": [3], "labels": [-100]}).row(0)
    assert (sample.ids.tolist(), sample.labels.tolist(), sample.grids, paths) == (
        [3],
        [-100],
        (),
        (),
    )


def test_rows_are_read_in_any_order_and_blank_lines_skipped(rows):
    kinds = [{"input_ids": [i], "labels": [i]} for i in range(3)]
    file = rows(b"", kinds[0], b"  \r", kinds[1], chat(user("a"), assistant("b")), kinds[2], b"")
    assert len(file) == 4
    assert [file.row(i)[0].ids[0] for i in (3, 0, 1)] == [2, 0, 1]
    assert file.where(1) == f"{file.path}:4"


def test_tokenizer_and_processor_are_loaded_only_if_needed(folder, config, rows, tmp_path):
    file = rows({"input_ids": [1, 2], "labels": [1, 2]}, model=tmp_path)
    assert file.row(0)[0].ids.tolist() == [1, 2]


CHAT_FAULTS = [
    (
        chat(user("<image>"), assistant("1")),
        "found 1 <image> marks for 0 images, expected as many (message 0 has 1); where the text "
        "itself is meant, write \\<image>",
    ),
    (
        chat(user("a"), assistant("1"), images=["one.png"]),
        "found 0 <image> marks for 1 images, expected as many",
    ),
    (
        chat(user("a")),
        "nothing to learn: found no assistant turn, expected at least one",
    ),
    (chat(), "messages: expected a list of at least one message"),
    ({"messages": "hello"}, "messages: expected a list of at least one message"),
    (
        chat({"role": "user", "text": "a"}),
        "message 0: found ['role', 'text'], expected the keys role and content",
    ),
    (chat("a"), 'message 0: found "a", expected the keys role and content'),
    (
        chat(user("a"), {"role": "bot", "content": "b"}),
        'message 1: found role "bot", expected one of system, user, assistant, tool',
    ),
    (
        chat(user([{"type": "text", "text": "a"}])),
        "message 0: expected the content as text with <image> for images",
    ),
    (
        chat(user("a\ud800b"), assistant("1")),
        "message 0: the content is no text, it has half a surrogate pair",
    ),
    (
        chat(user("<image>"), assistant("<image> and <image>"), images=["one.png"]),
        "found 3 <image> marks for 1 images, expected as many (message 0 has 1, message 1 has 2); "
        "where the text itself is meant, write \\<image>",
    ),
    (
        chat(user("Look at the <video>."), assistant("1")),
        "message 0: found <video>, but videos are not read from files; where the text itself is "
        "meant, write \\<video>",
    ),
]

TOKEN_FAULTS = [
    (
        {"input_ids": [1, 2, 3], "labels": [1, 2]},
        "found 3 input_ids and 2 labels, expected one label a token",
    ),
    ({"input_ids": [1, 2.5], "labels": [1, 2]}, "input_ids: found 2.5, expected integers"),
    ({"input_ids": [1, 2], "labels": [1, True]}, "labels: found true, expected integers"),
    ({"input_ids": [[1], [2]], "labels": [1, 2]}, "input_ids: found [1], expected integers"),
    ({"input_ids": "1 2", "labels": [1]}, "input_ids: found a string, expected a list of integers"),
    (
        {"input_ids": [2**63], "labels": [1]},
        "input_ids: found 9223372036854775808, expected integers",
    ),
]

ROW_FAULTS = [
    ([1, 2], "found a list, expected a JSON object"),
    (7, "found a number, expected a JSON object"),
    (
        {"text": "a"},
        "found keys ['text'], expected ['messages', 'images'] or ['input_ids', 'labels', "
        "'images'] (images may be left out)",
    ),
    (
        {"input_ids": [1], "images": []},
        "found keys ['input_ids', 'images'], expected ['messages', 'images'] or ['input_ids', "
        "'labels', 'images'] (images may be left out)",
    ),
    (
        {"messages": [], "image": "a.png"},
        "found keys ['messages', 'image'], expected ['messages', 'images'] or ['input_ids', "
        "'labels', 'images'] (images may be left out)",
    ),
    (
        chat() | {"images": "one.png"},
        'images: found a string, expected a list of paths, as ["a.png"]',
    ),
    (chat() | {"images": [1]}, "images[0]: found a number, expected a path"),
    (chat(images=["one.png", ""]), "images[1]: found an empty string, expected a path"),
    (
        chat(images=["https://example.org/one.png"]),
        "images[0]: found a URL (https), expected a path: download it to a file",
    ),
    (
        chat(images=["file:///data/on%20disk/one.png"]),
        "images[0]: found a file URL, expected a path: write '/data/on disk/one.png'",
    ),
    (
        chat(images=["data:image/png;base64," + "iVBO" * 8192]),
        "images[0]: found inline data (32,790 characters), expected a path: write it to a file",
    ),
    (
        chat(images=["iVBO" * 8192]),
        "images[0]: found a string of 32,768 characters, expected a path: write inline data to a "
        "file",
    ),
    (
        chat(images=[{"path": "one.png"}]),
        "images[0]: found an object with keys ['path'], expected a path: write 'one.png' itself",
    ),
    (
        chat(images=[{"bytes": "iVBO" * 8192, "path": None}]),
        "images[0]: found an object with keys ['bytes', 'path'], expected a path: write its bytes "
        "to a file, and name that",
    ),
    (
        b'{"input_ids": [1], "labels": [1], "labels": [2]}',
        "broken JSON: duplicate keys: labels",
    ),
    (
        b'{"messages": [{"role": "user", "content": "a", "role": "system"}]}',
        "broken JSON: duplicate keys: role",
    ),
    (
        b'{"input_ids": [1,',
        "broken JSON: Expecting value: line 1 column 18 (char 17): the row ends early, a row is "
        "one line",
    ),
    (
        {"a" * 10**6: 1},
        f"found keys ['{'a' * 78}... (1,000,004 characters) ...{'a' * 38}'], expected "
        "['messages', 'images'] or ['input_ids', 'labels', 'images'] (images may be left out)",
    ),
    (b'{"a": "\xff"}', "not UTF-8: invalid start byte at byte 7"),
    (b"[" * 100000, None),
]


@pytest.mark.parametrize(("row", "reason"), CHAT_FAULTS + TOKEN_FAULTS + ROW_FAULTS)
def test_faulty_rows_name_file_line_and_fault(rows, row, reason):
    file = rows({"input_ids": [1], "labels": [1]}, b"", row)
    with pytest.raises(RowError) as error:
        file.row(1)
    assert error.value.line == 3
    assert str(error.value).startswith(f"{file.path}:3: ")
    assert reason is None or error.value.reason == reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none.png", "no such image file"),
        ("text.png", "not an image in a format that Pillow knows"),
    ],
)
def test_faulty_images_name_row_and_image(rows, folder, name, reason):
    file = rows(chat(user("<image><image>"), assistant("1"), images=["one.png", name]))
    with pytest.raises(RowError) as error:
        file.row(0)
    assert str(error.value) == f"{file.path}:1: image {folder.parent / name}: {reason}"


@pytest.mark.parametrize(
    ("placeholders", "facts"), [(3, ("3", "4", "(1, 4, 4)")), (0, ("0", "4", "(1, 4, 4)"))]
)
def test_cut_placeholders_are_counted(rows, config, placeholders, facts):
    ids = [1, *[config.image_token_id] * placeholders, 2]
    file = rows({"input_ids": ids, "labels": ids, "images": ["four.png"]})
    with pytest.raises(RowError) as error:
        file.row(0)
    assert str(error.value).startswith(f"{file.path}:1: ")
    assert all(fact in error.value.reason for fact in facts)


@pytest.mark.parametrize(
    "row", [{"input_ids": [320], "labels": [1]}, {"input_ids": [1], "labels": [-1]}]
)
def test_ids_outside_of_the_vocabulary_are_refused(rows, row):
    with pytest.raises(RowError, match="is outside of the vocabulary of 320"):
        rows(row).row(0)


def test_a_row_without_tokens_is_refused(rows):
    with pytest.raises(RowError, match="no tokens"):
        rows({"input_ids": [], "labels": []}).row(0)


def test_a_byte_order_mark_and_null_for_no_images_are_taken(rows):
    bom, row = b"\xef\xbb\xbf", b'{"input_ids": [7], "labels": [7], "images": null}'
    file = rows(bom + row, bom, bom + row.replace(b"7", b"8"))
    assert [file.row(i)[0].ids.tolist() for i in range(len(file))] == [[7], [8]]


@pytest.mark.parametrize(("spelt", "stored"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_name_may_be_spelt_in_another_unicode_form_than_its_file(rows, folder, spelt, stored):
    name = f"Gr\u00fc\u00df \u304c {spelt}.png"
    Image.new("L", (64, 32)).save(folder.parent / normalize(stored, name))
    sample, paths = rows(
        chat(user("<image>"), assistant("1"), images=[normalize(spelt, name)])
    ).row(0)
    assert sample.grids == ((1, 2, 4),)
    assert paths == (folder.parent / normalize(stored, name),)


def test_rows_that_are_written_to_after_they_were_opened_are_refused(rows):
    kinds = [{"input_ids": [i], "labels": [i]} for i in (1, 2, 3)]
    file = rows(*kinds)
    before = os.stat(file.path)
    file.path.write_bytes(file.path.read_bytes().replace(b"[2]", b"[9]"))
    os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.row(0)[0].ids.tolist() == [1]
    with pytest.raises(RowError) as error:
        file.row(1)
    assert str(error.value) == (
        f"{file.path}:2: the data file was written to since it was opened: start again"
    )


ONE_A_LINE = "expected JSON Lines, one object a line"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            b'[{"a": 1},\n{"a": 2}]',
            f"the data is a JSON array, {ONE_A_LINE} (jq -c '.[]' makes it of one)",
        ),
        (
            b"\xef\xbb\xbf\n [\n]",
            f"the data is a JSON array, {ONE_A_LINE} (jq -c '.[]' makes it of one)",
        ),
        ('{"a": 1}'.encode("utf-16"), "the data is UTF-16 or UTF-32, expected UTF-8"),
        (b"\x1f\x8b\x08\x00", "the data is compressed: unpack it"),
        (b"PAR1\x15", f"the data is no text, {ONE_A_LINE}"),
    ],
)
def test_data_of_another_format_is_told_as_what_it_is(rows, content, reason):
    with pytest.raises(RowError) as error:
        rows(content)
    assert error.value.reason == reason


def test_data_that_cannot_be_read_twice_is_refused(folder, config, tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    for path, kind in ((tmp_path / "a.jsonl", "a pipe"), (Path("/dev/null"), "a device")):
        with pytest.raises(RowError) as error:
            RowFile(path, folder, config, ImageReader(folder, config))
        assert str(error.value) == (
            f"{path}: found {kind}, expected a file: rows are read again and in any order"
        )


def test_placeholders_of_videos_are_refused(rows, config):
    ids = [5, config.video_token_id, 7]
    with pytest.raises(RowError) as error:
        rows({"input_ids": ids, "labels": ids, "images": ["one.png"]}).row(0)
    assert error.value.reason == (
        "token 1 is the placeholder of videos (292), expected that of images (291): videos are "
        "not read from files"
    )


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_data_is_refused(rows, content):
    with pytest.raises(RowError) as error:
        rows(content)
    assert error.value.reason == (
        "the data is empty: found no rows, expected one JSON object a line"
    )


def test_a_missing_file_is_refused(folder, config, tmp_path):
    with pytest.raises(RowError) as error:
        RowFile(tmp_path / "a.jsonl", folder, config, ImageReader(folder, config))
    assert str(error.value) == (
        f"{tmp_path / 'a.jsonl'}: the data file cannot be read: No such file or directory"
    )


def with_template(folder, target, template, **settings):
    """A copy of a model folder with another chat template."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    (target / "chat_template.jinja").unlink()
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    old = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**old, **settings}))
    return target


TURN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}"
)
LAST = "{% for m in messages %}{{ m.content if loop.last else '' }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "{folder} has no chat template, and the data has chat rows"),
        (
            LAST,
            "the chat template renders messages 0 to 1 otherwise alone than in the whole chat, "
            "so what the assistant says there cannot be told apart",
        ),
        (
            TURN.replace("<|im_end|>", ";"),
            "the chat template does not end message 1 with the end-of-turn token '<|im_end|>'",
        ),
        (
            "{{ raise_exception('only users') }}",
            "the chat template refuses the messages: only users",
        ),
    ],
)
def test_templates_that_cannot_serve_are_refused(rows, folder, tmp_path, template, reason):
    other = with_template(folder, tmp_path / "b", template)
    file = rows(chat(user("a"), assistant("b"), user("c"), assistant("d")), model=other)
    with pytest.raises(RowError) as error:
        file.row(0)
    assert error.value.reason == reason.format(folder=other)


def test_template_of_an_older_processor_is_found(rows, folder, tmp_path):
    other = with_template(folder, tmp_path / "b", None)
    (other / "chat_template.json").write_text(json.dumps({"chat_template": TURN}))
    sample, _ = rows(chat(user("a"), assistant("b")), model=other).row(0)
    decoded = AutoTokenizer.from_pretrained(folder).decode(sample.ids)
    assert decoded == "[user]a<|im_end|>[assistant]b<|im_end|>"
    assert np.flatnonzero(sample.labels != -100).tolist() == list(range(len(sample.ids)))[-2:]


def test_a_missing_tokenizer_and_a_missing_end_are_refused(rows, folder, tmp_path):
    row = chat(user("a"), assistant("b"))
    with pytest.raises(RowError, match=r"the tokenizer of \S+ cannot be loaded"):
        rows(row, model=tmp_path).row(0)
    other = with_template(folder, tmp_path / "b", TURN, eos_token=None)
    with pytest.raises(RowError, match="names no eos_token, which ends a turn"):
        rows(row, model=other).row(0)


SCRIPT = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from model.config import load_config
from model.data import ImageReader
from model.data.rows import RowFile

data, folder = sys.argv[1:]
config = load_config(folder)
images = ImageReader(folder, config)
sample, paths = RowFile(data, folder, config, images).row(0)
print(len(images.patches(paths[0])), (sample.labels != -100).sum())
"""


def test_rows_are_read_where_transformers_modeling_cannot_be_imported(rows, folder):
    file = rows(chat(user("<image>"), assistant("1"), images=["two.png"]))
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(file.path), str(folder)]
    root = Path(__file__).parents[3]
    run = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "8 2\n", run.stderr
