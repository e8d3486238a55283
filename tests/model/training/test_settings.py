import pytest

from model.training.settings import Settings, SettingsError

REQUIRED = "--plan p.py --model m --data d.jsonl --steps 10 --batch 4".split()


def test_settings_have_the_documented_defaults():
    found = Settings.from_command_line(REQUIRED)
    assert (found.lr, found.min_lr, found.schedule, found.warmup) == (1e-3, 0.0, "constant", 0)
    assert (found.weight_decay, found.clip, found.seed, found.shuffle) == (0.0, 1.0, 0, True)
    assert (found.dtype, found.freeze, found.micro_batch, found.save) == ("float32", (), None, None)


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
        (["--speed", "9"], "unrecognized arguments: --speed 9"),
    ],
)
def test_settings_refuse_a_wrong_command_line(change, text):
    with pytest.raises(SettingsError) as error:
        Settings.from_command_line([*REQUIRED, *change])
    assert str(error.value).startswith(text)
    assert "usage: " in str(error.value)


def test_cosine_falls_from_the_peak_to_the_least_rate():
    more = "--schedule cosine --lr 1 --min-lr 0.2 --warmup 2".split()
    found = Settings.from_command_line([*REQUIRED, *more])
    assert [found.lr_at(step) for step in (0, 1, 2, 6, 10)] == pytest.approx([0.5, 1, 1, 0.6, 0.2])


def test_constant_stays_after_warm_up():
    found = Settings.from_command_line([*REQUIRED, "--warmup", "4"])
    assert [found.lr_at(step) for step in (0, 3, 9)] == pytest.approx([2.5e-4, 1e-3, 1e-3])
