"""Read digits with an exported model: transformers alone, none of this project's code.

``python -I examples/read_digits.py --model EXPORT --data heldout.jsonl`` lets the exported model
answer each row's question by greedy decoding and counts the answers that are right. It is to be
run as a process of its own: it makes this project's packages impossible to import, so what it
reports is what anybody gets from the checkpoint with plain transformers.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

PROJECT = ("vlshard", "model", "plans", "examples")
SHOWN = 5


def stand_alone() -> None:
    """Make the project impossible to import, and check that nothing of it is here."""
    for name in PROJECT:
        assert name not in sys.modules, f"{name} is imported already; the result would prove less"
        sys.modules[name] = None  # any import of it now raises
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        raise AssertionError(f"{name} can be imported; the result would prove less")


class Reader:
    """A model folder, loaded: asks the questions of chat rows.

    Args:
      folder: Hugging Face folder with weights.
    """

    def __init__(self, folder: Path):
        self.model = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.processor = AutoImageProcessor.from_pretrained(folder)

    def prompt(self, row: dict[str, Any], grids: torch.Tensor) -> str:
        """The question as the chat template renders it, with a placeholder per visual token."""
        question = row["messages"][0]["content"]
        texts = question.split("<image>")
        parts = [{"type": "text", "text": texts[0]}]
        for text in texts[1:]:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        pieces = rendered.split("<|image_pad|>")
        tokens = grids.prod(dim=1) // self.processor.merge_size**2
        filled = [
            "<|image_pad|>" * int(n) + piece for n, piece in zip(tokens, pieces[1:], strict=True)
        ]
        return pieces[0] + "".join(filled)

    @torch.inference_mode()
    def answer(self, rows: list[dict[str, Any]], folder: Path) -> list[str]:
        """Answers to the rows' questions, all generated as one left-padded batch."""
        images = [[Image.open(folder / path) for path in row["images"]] for row in rows]
        flat = [image for group in images for image in group]
        pixels = self.processor(images=flat, return_tensors="pt")
        grids = pixels["image_grid_thw"].split([len(group) for group in images])
        prompts = [self.prompt(row, grid) for row, grid in zip(rows, grids, strict=True)]
        tokens = self.tokenizer(prompts, padding=True, return_tensors="pt")
        is_image = tokens["input_ids"] == self.model.config.image_token_id
        generated = self.model.generate(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            mm_token_type_ids=is_image.int(),
            max_new_tokens=8,
            do_sample=False,
            **pixels,
        )
        new = generated[:, tokens["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)


def score(truths: list[str], answers: list[str]) -> dict[str, float]:
    """Part of answers that are wholly right, and part of digits right in their place."""
    pairs = list(zip(truths, answers, strict=True))
    digits = [
        place < len(answer) and answer[place] == digit
        for truth, answer in pairs
        for place, digit in enumerate(truth)
    ]
    exact = sum(truth == answer for truth, answer in pairs)
    return {"exact_match": exact / len(pairs), "digits_right": sum(digits) / len(digits)}


def read(reader: Reader, path: Path, batch: int) -> dict[str, Any]:
    """Ask all questions of a file of rows.

    Args:
      reader: the loaded model.
      path: JSON Lines of chat rows, each a question and its answer.
      batch: rows generated at once.
    Returns: the scores, the number of examples and the first few of them.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    answers = []
    for start in range(0, len(rows), batch):
        answers += reader.answer(rows[start : start + batch], path.parent)
    truths = [row["messages"][1]["content"] for row in rows]
    shown = [
        {"images": row["images"], "truth": truth, "answer": answer}
        for row, truth, answer in list(zip(rows, truths, answers, strict=True))[:SHOWN]
    ]
    return {**score(truths, answers), "examples": len(rows), "shown": shown}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with weights")
    parser.add_argument("--data", type=Path, required=True, help="held-out chat rows")
    parser.add_argument("--noise", type=Path, help="the same rows with noise for images")
    parser.add_argument("--batch", type=int, default=64, help="rows generated at once")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    stand_alone()
    reader = Reader(options.model)
    figures = {"heldout": read(reader, options.data, options.batch)}
    if options.noise:
        figures["noise"] = read(reader, options.noise, options.batch)
    for kind, found in figures.items():
        exact, digits = found["exact_match"], found["digits_right"]
        print(f"{kind}: {found['examples']} examples, exact match {exact:.3f}, digits {digits:.3f}")
    for example in figures["heldout"]["shown"]:
        print(f"  {example['truth']} read as {example['answer']}")
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
