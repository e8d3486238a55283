import re

import pytest

from model.training.command_line import USAGE
from model.training.settings import Settings, SettingsError

REQUIRED = "--plan p.py --model m --data d.jsonl --steps 10 --batch 4".split()


def test_settings_have_the_documented_defaults():
    found = Settings.from_command_line(REQUIRED)
    assert (found.lr, found.min_lr, found.schedule, found.warmup) == (1e-5, 0.0, "constant", 0)
    assert (found.weight_decay, found.decay, found.clip) == (0.0, "matrices", 1.0)
    assert (found.seed, found.shuffle, found.overwrite) == (0, True, False)
    assert (found.dtype, found.freeze, found.micro_batch, found.save) == ("float32", (), None, None)


def test_help_says_every_default(capsys):
    with pytest.raises(SystemExit) as end:
        Settings.from_command_line(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    told = "all every 0 1e-05 constant 0.0 0 0.0 matrices 1.0 all 3600.0 600.0 0.0 profile"
    told += " 300.0 float32"
    assert re.findall(r"default (\S+)", text) == told.split()
    assert "default: cuda if there is any, else cpu" in text


def test_settings_collect_freeze_patterns():
    more = "--freeze a.* b.* --no-shuffle --freeze c".split()
    found = Settings.from_command_line([*REQUIRED, *more])
    assert (found.freeze, found.shuffle) == (("a.*", "b.*", "c"), False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (["--batch", "0"], "argument --batch: 0 is not a finite number >= 1"),
        (["--lr", "nan"], "argument --lr: nan is not a finite number >= 0"),
        (["--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["--dtype", "float16"], "argument --dtype: invalid choice: 'float16'"),
        (["--decay", "norms"], "argument --decay: invalid choice: 'norms'"),
        (["--speed", "9"], "unrecognized arguments: --speed 9"),
        (["--micro", "9"], "unrecognized arguments: --micro 9"),
        (["--data", "e"], "argument --data: it is given more than once: d.jsonl and e"),
        (["--seed", "1", "--seed=1"], "argument --seed: it is given more than once: 1 and 1"),
        (["--device", "cpu", "--device", "cuda"], "argument --device: it is given more than once"),
    ],
)
def test_settings_refuse_a_wrong_command_line(change, text):
    with pytest.raises(SettingsError) as error:
        Settings.from_command_line([*REQUIRED, *change])
    first, usage = str(error.value).split("\n  ")
    assert first.startswith(text)
    assert usage == USAGE


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            "--min-lr 1e-3 --lr 1e-4 --schedule cosine",
            "--min-lr 0.001 is above --lr 0.0001: the rate falls from --lr to --min-lr",
        ),
        ("--min-lr 1e-4 --schedule cosine", "--min-lr 0.0001 is above --lr 1e-05: the rate falls"),
        ("--eval-every 3", "--eval-every 3 needs --eval: on which rows?"),
        (
            "--min-lr 1e-6",
            "--min-lr 1e-06 is never reached by --schedule constant: leave it out, or take "
            "--schedule cosine",
        ),
    ],
)
def test_rates_that_contradict_each_other_are_refused(change, text):
    with pytest.raises(SettingsError) as error:
        Settings.from_command_line([*REQUIRED, *change.split()])
    assert str(error.value).startswith(text)


def test_epochs_are_steps_once_the_rows_are_known():
    few = "--plan p.py --model m --data d.jsonl --batch 4".split()
    found = Settings.from_command_line([*few, "--epochs", "1.5"])
    assert [found.for_rows(rows).steps for rows in (16, 17, 1)] == [6, 7, 1]
    assert Settings.from_command_line(REQUIRED).for_rows(3).steps == 10
    for more in ([], ["--epochs", "1", "--steps", "2"], ["--epochs", "0"]):
        with pytest.raises(SettingsError, match=r"--steps|--epochs"):
            Settings.from_command_line([*few, *more])


def test_cosine_falls_from_the_peak_to_the_least_rate():
    more = "--schedule cosine --lr 1 --min-lr 0.2 --warmup 2".split()
    found = Settings.from_command_line([*REQUIRED, *more])
    assert [found.lr_at(step) for step in (0, 1, 2, 6, 10)] == pytest.approx([0.5, 1, 1, 0.6, 0.2])


def test_constant_stays_after_warm_up():
    found = Settings.from_command_line([*REQUIRED, "--warmup", "4", "--lr", "1e-3"])
    assert [found.lr_at(step) for step in (0, 3, 9)] == pytest.approx([2.5e-4, 1e-3, 1e-3])
