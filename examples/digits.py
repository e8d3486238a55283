"""Make a data set of handwritten digits: images, chat rows and a small model folder to train.

``python examples/digits.py --out DIR --seed S`` writes scikit-learn's 1,797 scanned digits as PNG
files and builds from them rows that ask for the 1 to 4 digits shown, each in its own image. Scans
are shifted and turned a little, images have several sizes. Scans that are held out occur in no
training image. Nothing is downloaded.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

NUM_HELD_OUT = 360
PROMPT = "Read the digits."
MOST_DIGITS = 4
SIZES = ((32, 32), (64, 32), (32, 64), (64, 64))  # height, width; 32x32 pixels are one token
SIZE_CHANCES = (0.5, 0.1, 0.1, 0.3)
FILL = 0.9  # the digit's side as a part of the image's shorter one
SHAKE = 0.1  # shift as a part of the digit's side, turn as a part of a right angle
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def draw_scan(scan: NDArray[np.float64], size: tuple[int, int], rng: Generator) -> Image.Image:
    """Draw an 8x8 scan into an image, shifted and turned by chance, about as large as fits.

    In an image that is longer one way, the digit is at one end or in the middle.

    Args:
      scan: ink, 0 (none) to 16, 8 rows of 8.
      size: height and width of the image [pixels].
      rng: where chance comes from.
    Returns: a grey image, white on black.
    """
    height, width = size
    side = FILL * min(size)
    grey = Image.fromarray(np.round(np.pad(scan, 1) * (255 / 16)).astype(np.uint8))
    angle = rng.uniform(-SHAKE, SHAKE) * math.pi / 2
    dy, dx = rng.uniform(-SHAKE, SHAKE, size=2) * side
    spare_y, spare_x = rng.integers(-1, 2) * (np.array(size) - min(size)) / 2
    scale = 8 / side
    cos, sin = math.cos(angle) * scale, math.sin(angle) * scale
    y, x = height / 2 + dy + spare_y, width / 2 + dx + spare_x
    affine = (cos, sin, 5 - cos * x - sin * y, -sin, cos, 5 + sin * x - cos * y)
    return grey.transform((width, height), Image.Transform.AFFINE, affine, Image.Resampling.BICUBIC)


def draw_noise(size: tuple[int, int], rng: Generator) -> Image.Image:
    """An image of independent grey values."""
    return Image.fromarray(rng.integers(0, 256, size=size, dtype=np.uint8))


def draw_size(rng: Generator) -> tuple[int, int]:
    """Height and width of an image, by chance."""
    return SIZES[rng.choice(len(SIZES), p=SIZE_CHANCES)]


def chat_row(images: Sequence[str], answer: str) -> dict[str, Any]:
    """One row: images and the question in the user's turn, the digits in the assistant's."""
    question = "<image>" * len(images) + PROMPT
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": list(images)}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_png(image: Image.Image, path: Path) -> None:
    """Write an image, fast rather than small."""
    image.save(path, compress_level=1)


def write_train(
    out: Path, scans: NDArray[np.int64], num_rows: int, variants: int, rng: Generator
) -> None:
    """Write training images, each scan drawn several times, and rows that choose among them.

    Args:
      out: folder of the data set.
      scans: indices of the scans to train on.
      num_rows: number of rows to write.
      variants: how often each scan is drawn.
      rng: where chance comes from.
    """
    digits = load_digits()
    folder = out / "images" / "train"
    folder.mkdir(parents=True)
    names, labels = [], []
    for scan in scans:
        for variant in range(variants):
            names.append(f"images/train/scan{scan:04d}-{variant}.png")
            labels.append(str(digits.target[scan]))
            save_png(draw_scan(digits.images[scan], draw_size(rng), rng), out / names[-1])
    counts = rng.integers(1, MOST_DIGITS + 1, size=num_rows)
    chosen = rng.integers(0, len(names), size=(num_rows, MOST_DIGITS))
    rows = [
        chat_row([names[i] for i in picks[:count]], "".join(labels[i] for i in picks[:count]))
        for count, picks in zip(counts, chosen, strict=True)
    ]
    write_rows(out / "train.jsonl", rows)


def write_heldout(out: Path, scans: NDArray[np.int64], num_rows: int, rng: Generator) -> None:
    """Write held-out rows, and their twins whose images are noise of the same sizes.

    Args:
      out: folder of the data set.
      scans: indices of the held-out scans; each is used before any is used again.
      num_rows: number of rows to write.
      rng: where chance comes from.
    """
    digits = load_digits()
    for kind in ("heldout", "noise"):
        (out / "images" / kind).mkdir(parents=True)
    counts = rng.integers(1, MOST_DIGITS + 1, size=num_rows)
    rounds = -(-int(counts.sum()) // len(scans))
    queue = np.concatenate([rng.permutation(scans) for _ in range(rounds)])
    rows, twins, used = [], [], 0
    for count in counts:
        names = []
        for scan in queue[used : used + count]:
            names.append(f"images/heldout/scan{scan:04d}-{used}.png")
            size = draw_size(rng)
            save_png(draw_scan(digits.images[scan], size, rng), out / names[-1])
            save_png(draw_noise(size, rng), out / names[-1].replace("heldout", "noise"))
            used += 1
        answer = "".join(str(digits.target[scan]) for scan in queue[used - count : used])
        rows.append(chat_row(names, answer))
        twins.append(chat_row([name.replace("heldout", "noise") for name in names], answer))
    write_rows(out / "heldout.jsonl", rows)
    write_rows(out / "noise.jsonl", twins)


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with Qwen's special tokens: any text, digits one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    words = f"{PROMPT} system user assistant"
    tokenizer.train_from_iterator([words, words], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The small Qwen3-VL-MoE to train, as its config.json."""
    token_id = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    text = {
        "model_type": "qwen3_vl_moe_text",
        "vocab_size": -(-tokenizer.get_vocab_size() // 32) * 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.08,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
            "rope_type": "default",
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": token_id["<|im_end|>"],
        "pad_token_id": token_id["<|endoftext|>"],
        "router_aux_loss_coef": 0.001,
    }
    vision = {
        "model_type": "qwen3_vl_moe",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.08,
    }
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "image_token_id": token_id["<|image_pad|>"],
        "video_token_id": token_id["<|video_pad|>"],
        "vision_start_token_id": token_id["<|vision_start|>"],
        "vision_end_token_id": token_id["<|vision_end|>"],
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }


def write_model(folder: Path) -> None:
    """Write a Hugging Face model folder without weights.

    Args:
      folder: where config, tokenizer, chat template and image processor settings go.
    """
    tokenizer = make_tokenizer()
    config = model_config(tokenizer)
    vision = config["vision_config"]
    files = {
        "config.json": config,
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 1024,
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
            "patch_size": vision["patch_size"],
            "temporal_patch_size": vision["temporal_patch_size"],
            "merge_size": vision["spatial_merge_size"],
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    }
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


def write_data(
    out: Path, seed: int = 0, train_rows: int = 32000, heldout_rows: int = 512, variants: int = 6
) -> None:
    """Write the whole data set: model folder, images and rows; the same for the same arguments.

    Args:
      out: folder to make; what an earlier call wrote must be gone.
      seed: chooses the held-out scans and everything drawn.
      train_rows: rows of train.jsonl.
      heldout_rows: rows of heldout.jsonl and of noise.jsonl.
      variants: how often each training scan is drawn.
    """
    rng = np.random.default_rng(seed)
    scans = rng.permutation(len(load_digits().target))
    heldout, train = scans[:NUM_HELD_OUT], scans[NUM_HELD_OUT:]
    assert not set(heldout) & set(train), "a held-out scan would be trained on"
    assert len(heldout) + len(train) == len(scans) == 1797, "scans are missing"
    write_model(out / "model")
    write_train(out, train, train_rows, variants, rng)
    write_heldout(out, heldout, heldout_rows, rng)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-rows", type=int, default=32000)
    parser.add_argument("--heldout-rows", type=int, default=512)
    parser.add_argument("--variants", type=int, default=6, help="drawings of each training scan")
    options = parser.parse_args(arguments)
    if options.out.exists() and os.listdir(options.out):
        parser.error(f"{options.out} is not empty")
    write_data(
        options.out, options.seed, options.train_rows, options.heldout_rows, options.variants
    )


if __name__ == "__main__":
    main()
