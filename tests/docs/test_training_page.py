"""The commands of docs/training.md that begin with files and end with a model, as they stand there.

Ranks are those of the test's pools, so that the commands start none of their own; how a command
starts its ranks is tested with the program.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLMoeForConditionalGeneration

from examples import digits
from model.training import parity, parity_rank
from model.training.interruption import Interruption
from model.training.parity_rank import measure
from model.training.program import RANK_MODULE
from model.training.settings import Settings
from model.training.train import train
from tests.train_folder import CPU

PAGE = Path("docs/training.md").read_text()
SECTION = PAGE.partition("## From a checkpoint")[2].partition("\n## ")[0]
COMMANDS = [
    shlex.split(block.replace("\\\n", " "))
    for block in re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
]


def trained(arguments):
    """The status of a rank."""
    torch.manual_seed(0)
    return train(Settings.from_command_line(arguments), CPU, Interruption())


def compared(arguments):
    """The status of a rank of the parity command."""
    settings, folder = parity_rank.settings_of(arguments)
    return measure(settings, folder, CPU)


@pytest.fixture
def carry_out(ranks, tmp_path, monkeypatch):
    """Carries out a command of the page, with files in a folder of the test."""

    def in_pool(module, arguments, world, shutdown_timeout):
        function = compared if module == parity.RANK_MODULE else trained
        statuses = ranks(world).run(function, arguments, timeout=120)
        assert len(set(statuses)) == 1
        return statuses[0]

    def run(command):
        words = [word.replace("runs/try", str(tmp_path / "try")) for word in command]
        if words[:2] == ["python", "examples/digits.py"]:
            digits.main(words[2:])
            return 0
        if words[:2] == ["python", "-c"]:
            exec(words[2], {})
            return 0
        assert words[:2] == ["python", "-m"]
        module, *arguments = words[2:]
        if module == "model.training.parity":
            return parity.main(arguments)
        assert module == "model.training"
        settings = Settings.from_command_line(arguments)
        return in_pool(RANK_MODULE, arguments, settings.ranks, settings.shutdown_timeout)

    monkeypatch.setattr(parity, "start_ranks", in_pool)
    return run


def test_the_page_leads_to_a_model_that_transformers_loads(carry_out, tmp_path, capsys):
    assert len(COMMANDS) == 5
    for command in COMMANDS:
        assert carry_out(command) == 0, command
    assert "alike within 1e-05: 1 losses" in capsys.readouterr().out
    made = tmp_path / "try"
    named = set(re.findall(r"^\| `runs/try/([a-z.]+)", SECTION, re.MULTILINE))
    before = {"model", "images", "train.jsonl", "heldout.jsonl", "noise.jsonl"}
    assert {path.name for path in made.iterdir()} - before == named
    assert len(list((made / "traces").iterdir())) == 2
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    _, report = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        made / "export", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
