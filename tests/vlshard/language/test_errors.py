import pytest

from vlshard.language.errors import (
    LayoutError,
    PlanError,
    ShardError,
    Span,
    SpecError,
    edit_distance,
    nearest,
)


def test_error_renders_headline_place_text_carets_and_notes():
    error = LayoutError(
        "unknown mesh axis 'xp'",
        text="b s@xp h d",
        spans=[Span(4, 6)],
        where="plans/long.py:41 text.q",
        notes=["mesh: dp=2 cp=8; did you mean 'cp' or 'dp'?"],
    )
    assert str(error) == (
        "unknown mesh axis 'xp'\n"
        "  plans/long.py:41 text.q: b s@xp h d\n"
        "                               ^^\n"
        "  mesh: dp=2 cp=8; did you mean 'cp' or 'dp'?"
    )


@pytest.mark.parametrize(
    ("parts", "rendered"),
    [
        ({}, "wrong"),
        ({"text": "a b"}, "wrong\n  a b"),
        ({"where": "plans/a.py"}, "wrong\n  plans/a.py"),
        ({"notes": ["fix: this", "or that"]}, "wrong\n  fix: this\n  or that"),
        ({"text": "a\tb\nc", "spans": [Span(2, 3), Span(4, 5)]}, "wrong\n  a b c\n    ^ ^"),
    ],
)
def test_error_renders_the_parts_it_has(parts, rendered):
    assert str(ShardError("wrong", **parts)) == rendered


@pytest.mark.parametrize("kind", [SpecError, LayoutError, PlanError])
def test_error_is_a_value_error_of_the_package(kind):
    assert issubclass(kind, ValueError)
    assert kind.__module__ == "vlshard"


@pytest.mark.parametrize(
    ("name", "known", "offer"),
    [
        ("xp", ["dp", "cp"], "; did you mean 'cp' or 'dp'?"),
        ("xp", ["dp", "tp", "cp"], "; did you mean 'cp', 'dp' or 'tp'?"),
        ("CP", ["cp", "dp"], "; did you mean 'cp'?"),
        ("zigzga", ["zigzag", "balance", "home"], "; did you mean 'zigzag'?"),
        ("tensor", ["dp", "cp"], ""),
        ("t", ["b", "s"], ""),
        ("s", ["b", "sq"], "; did you mean 'sq'?"),
        ("cp", [], ""),
    ],
)
def test_nearest_offers_names_that_are_alike(name, known, offer):
    assert nearest(name, known) == offer


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("", "ab", 2), ("kitten", "sitting", 3), ("ab", "ba", 1), ("cp", "cp", 0)],
)
def test_edit_distance(a, b, distance):
    assert edit_distance(a, b) == distance
    assert edit_distance(b, a) == distance
    assert edit_distance(a, b, distance) == distance
    assert edit_distance(a, b, distance - 1) >= distance


@pytest.mark.parametrize(
    ("name", "known", "offer"),
    [
        ("x" * 20_000, ["x" * 19_999], ""),
        ("x", ["y" * 20_000, "xy"], "; did you mean 'xy'?"),
        ("a" * 64, ["a" * 63 + "b"], f"; did you mean '{'a' * 63}b'?"),
        ("abc", [f"z{i}z" for i in range(100_000)], ""),
    ],
)
def test_nearest_bounds_its_search(name, known, offer):
    assert nearest(name, known) == offer


def test_long_texts_are_shown_around_the_culprit():
    text = " ".join(f"d{i}" for i in range(2000))
    error = LayoutError(
        "a" * 10**6, text=f"{text} x@xp h", spans=[Span(len(text) + 3, len(text) + 5)]
    )
    headline, shown, carets = str(error).splitlines()
    assert headline == f"{'a' * 1000}... (1,000,000 characters) ...{'a' * 500}"
    assert shown.startswith("  ...934 d1935 d1936 ")
    assert shown.endswith(" d1998 d1999 x@xp h")
    assert [i for i, letter in enumerate(carets) if letter == "^"] == [
        shown.index("xp"),
        shown.index("xp") + 1,
    ]


def test_each_line_of_a_headline_of_several_may_be_as_long():
    assert str(LayoutError("\n".join(["a" * 2000] * 9))) == "\n".join(["a" * 2000] * 9)


def test_many_notes_are_counted():
    lines = str(PlanError("no", notes=["b" * 5000, *["c"] * 2000])).splitlines()
    assert len(lines) == 32
    assert len(lines[1]) < 1600
    assert lines[-1] == "  and 1,971 more"
