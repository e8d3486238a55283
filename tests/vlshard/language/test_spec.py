import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlshard.language.errors import Span, SpecError
from vlshard.language.spec import arrow, spec
from vlshard.language.syntax import Axis, Dots, Group, Int, Name, Spec, Split

LAWS = settings(derandomize=True, database=None, deadline=None, max_examples=200)

VALID = [
    "b s@cp h d",
    "b@dp s@cp.zigzag m",
    "b s m + tp",
    "(h@tp d) m",
    "(3 h@tp d) m",
    "e@(dp cp) (2 f@tp) m",
    "(img s) c",
    "(img s)@cp c",
    "(img s@cp) c",
    "(img s@cp.zigzag) c",
    "(img@cp s) c",
    "(img@cp.balance s) c",
    "(img@dp.home s)@cp c",
    "(img@dp.home@cp s@tp)@ep c",
    "(img@(dp cp).balance s) c",
    "b@dp.home@cp ... m",
    "s@dp@cp.0@cp.ring.zigzag",
    "((a@x 2) b)@y 3 + dp cp.1",
    "+ dp cp",
    "",
]


def split(*axes, order=None):
    return Split(tuple(Axis(*a.split(".")) for a in axes), order)


@pytest.mark.parametrize(
    ("text", "dims", "pending"),
    [
        ("b s@cp", (Name("b"), Name("s", (split("cp"),))), ()),
        ("s@cp.zigzag@tp", (Name("s", (split("cp", order="zigzag"), split("tp"))),), ()),
        ("s@cp.0", (Name("s", (split("cp.0"),)),), ()),
        ("s@cp.ring.zigzag", (Name("s", (split("cp.ring", order="zigzag"),)),), ()),
        ("e@(dp cp.1)", (Name("e", (split("dp", "cp.1"),)),), ()),
        (
            "(img@dp.home s)@cp 3",
            (Group((Name("img", (split("dp", order="home"),)), Name("s")), (split("cp"),)), Int(3)),
            (),
        ),
        (
            "(3 h@tp d) ...",
            (Group((Int(3), Name("h", (split("tp"),)), Name("d"))), Dots()),
            (),
        ),
        ("m + tp (dp cp.0)", (Name("m"),), (Axis("tp"), Axis("dp"), Axis("cp", "0"))),
    ],
)
def test_spec_reads_the_tree(text, dims, pending):
    assert spec(text) == Spec(text, dims, pending)


@pytest.mark.parametrize("text", VALID)
def test_spec_prints_itself(text):
    assert str(spec(text)) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("  b   s @ cp.zigzag ", "b s@cp.zigzag"),
        ("( img s ) @cp+tp", "(img s)@cp + tp"),
        ("e@(dp)", "e@dp"),
        ("s + (dp cp) tp", "s + dp cp tp"),
        ("b\ts\n...", "b s ..."),
    ],
)
def test_spec_of_loose_text_is_canonical(text, canonical):
    assert spec(text) == spec(canonical)
    assert hash(spec(text)) == hash(spec(canonical))
    assert str(spec(text)) == canonical


def test_spec_is_cached():
    assert spec("b s@cp h d") is spec("b s@cp h d")


def test_spec_spans_are_the_characters_of_each_part():
    text = "b (img@dp.home s)@(tp cp.1) + ep"
    tree = spec(text)
    group = tree.dims[1]
    home = group.items[0].splits[0]
    spans = [group.span, group.items[0].span, home.span, home.order_span, group.splits[0].span]
    assert [text[start:stop] for start, stop in spans] == [
        "(img@dp.home s)@(tp cp.1)",
        "img@dp.home",
        "@dp.home",
        "home",
        "@(tp cp.1)",
    ]
    axes = [text[axis.span.start : axis.span.stop] for axis in tree.axes]
    assert axes == ["dp", "tp", "cp.1", "ep"]


def test_spec_names_labels_and_axes():
    tree = spec("b@dp (img@cp.home s@tp)@ep (3 h) ... + x")
    assert tree.names == ("b", "img", "s", "h")
    assert [tree.label(i) for i in range(4)] == ["b", "(img s)", "(3 h)", "..."]
    assert [str(axis) for axis in tree.axes] == ["dp", "cp", "tp", "ep", "x"]


@pytest.mark.parametrize(
    ("text", "ndim", "expanded"),
    [
        ("b ... m", 2, "b m"),
        ("b@dp ... m", 4, "b@dp _0 _1 m"),
        ("b m", 2, "b m"),
    ],
)
def test_expand_names_the_dims_under_dots(text, ndim, expanded):
    assert spec(text).expand(ndim) == spec(expanded)


@pytest.mark.parametrize(("text", "ndim"), [("b ... m", 1), ("b m", 3), ("b m", 1)])
def test_expand_refuses_another_number_of_dims(text, ndim):
    with pytest.raises(SpecError, match=f"the spec has 2 dims, the tensor {ndim}"):
        spec(text).expand(ndim)


@pytest.mark.parametrize(
    ("text", "carets", "headline", "note"),
    [
        ("b s@", "   ^", "'@' needs a mesh axis after it", None),
        (
            "b (where s)",
            "   ^^^^^",
            "a dim cannot be named 'where'",
            "layout and reshard take where= for the place that messages name",
        ),
        ("s@.x", "  ^", "a mesh axis was expected after '@', got '.'", None),
        ("s@cp.", "    ^", "'.' needs a part of an axis or an order after it", None),
        ("s@cp. h d", "   ^^^^", "no blanks around '.'", None),
        ("s@cp .0 d", "   ^^^^", "no blanks around '.'", None),
        ("s@(dp cp). h", "        ^^^^", "no blanks around '.'", None),
        ("b (img s", "  ^", "this bracket is never closed", None),
        ("b (img s + tp", "  ^", "this bracket is never closed", None),
        ("s@(dp", "  ^", "this bracket is never closed", None),
        ("b ) s", "  ^", "unexpected ')'; a dim was expected", None),
        ("@cp", "^", "unexpected '@'; a dim was expected", None),
        ("()", "^^", "a bracket needs dims inside", None),
        ("s@()", "  ^^", "a bracket needs axes inside", None),
        ("b s +", "    ^", "'+' needs the axes over which a sum is pending", None),
        ("b -> b", "  ^^", "unexpected '->'", None),
        ("b é", "  ^", "unexpected character 'é'", None),
        ("b - s", "  ^", "unexpected character '-'", None),
        ("b 3h", "  ^^", "'3h': a name cannot start with a digit", None),
        ("b 0", "  ^", "a size is at least 1 and has at most 18 digits: 0", None),
        ("b 3@cp", "  ^^", "the size 3 cannot be split; name the dim", None),
        ("b ...@cp", "  ^^^^", "'...' cannot be split; name the dim", None),
        ("b s b", "^   ^", "dim 'b' occurs twice", None),
        ("s (img s)", "^      ^", "dim 's' occurs twice", None),
        ("... b ...", "^^^   ^^^", "dim '...' occurs twice", None),
        ("(" * 9, "        ^", "more than 8 brackets inside each other", None),
        (
            "b@cp s@cp",
            "  ^^   ^^",
            "mesh axis 'cp' occurs twice",
            "a spec uses an axis at most once",
        ),
        (
            "(img@cp s)@(dp cp) + cp",
            "     ^^        ^^    ^^",
            "mesh axis 'cp' occurs twice",
            "a spec uses an axis at most once",
        ),
        (
            "b@cp s@cp.0",
            "  ^^   ^^^^",
            "mesh axis 'cp' occurs twice",
            "a spec uses an axis at most once",
        ),
        (
            "b@cp.0 s@cp.0",
            "  ^^^^   ^^^^",
            "mesh axis 'cp.0' occurs twice",
            "a spec uses an axis at most once",
        ),
        (
            "s@cp.balance",
            "     ^^^^^^^",
            "'.balance' cannot stand on 's'",
            "it goes on the first name of a packed dim: '(img@cp.balance s)'",
        ),
        (
            "(img s@cp.balance)",
            "          ^^^^^^^",
            "'.balance' cannot stand on 's'",
            "it goes on the first name of a packed dim: '(img@cp.balance s)'",
        ),
        (
            "(img s@dp.home)",
            "          ^^^^",
            "'.home' cannot stand on 's'",
            "it goes on the first name of a packed dim or a plain batch dim: "
            "'(img@dp.home s)', 'b@dp.home'",
        ),
        (
            "(img s)@dp.home",
            "           ^^^^",
            "'.home' cannot stand on '(img s)'",
            "it goes on the first name of a packed dim or a plain batch dim: "
            "'(img@dp.home s)', 'b@dp.home'",
        ),
        (
            "(img@cp.zigzag s)",
            "        ^^^^^^",
            "'.zigzag' cannot stand on 'img'",
            "it goes on a plain dim, or the inner name of a packed one: "
            "'s@cp.zigzag', '(img s@cp.zigzag)'",
        ),
        ("b@dp.home@cp.home", "     ^^^^    ^^^^", "'.home' twice on 'b'", None),
        ("s@cp.zigzag.home", "     ^^^^^^", "a split has one order", None),
        (
            "s@(dp.home cp)",
            "      ^^^^",
            "'home' is an order, and no part of an axis can be named like one",
            "an order comes last in a split: '@cp.zigzag', '@(dp cp).home'",
        ),
        (
            "s + tp.zigzag",
            "       ^^^^^^",
            "'zigzag' is an order, and no part of an axis can be named like one",
            "an order comes last in a split: '@cp.zigzag', '@(dp cp).home'",
        ),
        (
            "s@cp.zigzag.ring",
            "     ^^^^^^",
            "'zigzag' is an order, and no part of an axis can be named like one",
            "an order comes last in a split: '@cp.zigzag', '@(dp cp).home'",
        ),
        (
            "s@cp.ring.zigzga",
            "          ^^^^^^",
            "unknown order '.zigzga'",
            "orders are .zigzag, .balance and .home; did you mean 'zigzag'?",
        ),
        (
            "(img@(dp cp).blance s)",
            "             ^^^^^^",
            "unknown order '.blance'",
            "orders are .zigzag, .balance and .home; did you mean 'balance'?",
        ),
    ],
)
def test_spec_points_at_the_fault(text, carets, headline, note):
    with pytest.raises(SpecError) as error:
        spec(text)
    expected = [headline, f"  {text}", f"  {carets}", *([f"  {note}"] if note else [])]
    assert str(error.value).split("\n") == expected


def test_arrow_reads_both_sides_with_spans_in_the_whole_text():
    text = "b s@cp h d -> b s h@cp d"
    src, dst = arrow(text)
    assert (src, dst) == (spec("b s@cp h d"), spec("b s h@cp d"))
    assert (src.text, dst.text) == (text, text)
    assert dst.axes[0].span == Span(20, 22)


@pytest.mark.parametrize(
    ("text", "carets", "headline", "note"),
    [
        ("b s", "  ^", "an arrow needs a spec on each side of one '->'", None),
        ("b -> b -> b", "       ^^", "unexpected '->'", None),
        ("b -> (b s", "     ^", "this bracket is never closed", None),
        ("(b -> b", "^", "this bracket is never closed", None),
        (
            "b s -> s b",
            "       ^ ^",
            "the dims of both sides must be the same, in the same order",
            "only the layout changes here; einops.rearrange(x, 'b s -> s b') does this, "
            "before or after",
        ),
        (
            "b (h d)@tp -> b h@tp",
            "  ^^^^^^^^      ^^^^",
            "the dims of both sides must be the same, in the same order",
            "only the layout changes here; einops.rearrange reorders and reshapes",
        ),
        (
            "s 3 3 -> s 3",
            "    ^",
            "the dims of both sides must be the same, in the same order",
            "only the layout changes here; einops.rearrange reorders and reshapes",
        ),
        (
            "b s + dp -> b s + dp tp",
            "                     ^^",
            "a sum over tp is pending on the right but not on the left",
            "a sum can be carried out on the way, but not begun",
        ),
    ],
)
def test_arrow_points_at_the_fault(text, carets, headline, note):
    with pytest.raises(SpecError) as error:
        arrow(text)
    expected = [headline, f"  {text}", f"  {carets}", *([f"  {note}"] if note else [])]
    assert str(error.value).split("\n") == expected


def assert_reads_or_points(text):
    try:
        tree = spec(text)
    except SpecError as error:
        assert error.spans
        assert all(0 <= start < stop <= len(text) for start, stop in error.spans)
    else:
        assert spec(str(tree)) == tree


@pytest.mark.parametrize("text", VALID)
def test_spec_reads_or_refuses_each_truncated_prefix(text):
    for stop in range(len(text)):
        assert_reads_or_points(text[:stop])


@LAWS
@given(st.text("abs3 @.+()->cpzigome\n", max_size=24))
def test_spec_reads_or_refuses_any_text(text):
    assert_reads_or_points(text)


@st.composite
def canonical_texts(draw):
    """Texts of all forms; names and axes come from supplies, so that none occurs twice."""
    names, axes = iter("abcdefghijklmnopqrstuvwxyz"), (f"x{i}" for i in range(99))

    def axis():
        return next(axes) + draw(st.sampled_from(["", ".0", ".ring"]))

    def split(orders):
        joined = draw(st.booleans())
        text = f"@({axis()} {axis()})" if joined else f"@{axis()}"
        return text + draw(st.sampled_from(["", *orders]))

    def name(*orders):
        return next(names) + "".join(split(orders) for _ in range(draw(st.integers(0, 2))))

    def dim():
        match draw(st.sampled_from(["name", "int", "group", "group of a group"])):
            case "name":
                return name(".zigzag")
            case "int":
                return str(draw(st.integers(1, 99)))
            case "group":
                inner = draw(st.sampled_from([name(".zigzag"), "2"]))
                return f"({name('.balance')} {inner}){split([])}"
            case _:
                return f"(2 ({name()} 3){split([])} {name('.zigzag')})"

    dims = [dim() for _ in range(draw(st.integers(0, 4)))]
    pending = [axis() for _ in range(draw(st.integers(0, 2)))]
    return " ".join([*dims, *(["+", *pending] if pending else [])])


@LAWS
@given(canonical_texts(), st.data())
def test_spec_reads_back_what_it_prints(text, data):
    tree = spec(text)
    assert str(tree) == text
    assert spec(str(tree)) == tree
    assert_reads_or_points(text[: data.draw(st.integers(0, len(text)))])
