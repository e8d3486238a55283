"""Splits of a plan are checked with all else: dims, axes, heads, and the cuts of the tokens."""

import pytest

from model.config.config import Config
from tests.tiny import tiny_raw
from vlshard import Inside, Mesh, Plan, PlanError, fsdp, gather, layout, load_plan
from vlshard.plan.describe import describe_storage
from vlshard.plan.split_remarks import split_remarks

TP = {"text.q": "h@tp d", "text.k": "kv@tp d", "text.mlp": "f@tp"}
PAIR = {"dp": 1, "tp": 2}
FOUR = {"dp": 1, "cp": 2, "tp": 2}


def config(key_heads: int = 2) -> Config:
    text = {"num_key_value_heads": key_heads, "mlp_only_layers": [1, 3]}
    return Config.from_dict(tiny_raw(text=text, vision={"num_heads": 4}))


def faults(mesh, splits, *, tokens="b@dp.home s m", attention=None, key_heads=2) -> str:
    plan = Plan(
        mesh=Mesh(**mesh),
        params={"**": fsdp("dp tp")},
        layouts={"vision.patches": "(img@dp.home s) c", "text.tokens": tokens},
        splits=splits,
        attention=attention or {},
    )
    with pytest.raises(PlanError) as error:
        plan.bind(config(key_heads), plan.mesh.size)
    return str(error.value)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            {"text.qq": "h@tp d"},
            "unknown inside 'text.qq'; did you mean 'text.q'?\n"
            "  plan text.qq: h@tp d\n"
            "  insides that can be split: text.q, text.k, text.mlp, text.experts, text.vocab, "
            "vision.q, vision.mlp",
        ),
        (
            {"text.q": "h@tp e", "text.k": "kv@tp d"},
            "this inside has dims 'h d'\n  plan text.q: h@tp e\n                    ^",
        ),
        (
            {"text.mlp": "f@xp"},
            "unknown mesh axis 'xp'\n"
            "  plan text.mlp: f@xp\n"
            "                   ^^\n"
            "  mesh: dp=1 tp=2; did you mean 'dp' or 'tp'?",
        ),
        (
            {"text.q": "h@tp d@dp", "text.k": "kv@tp d"},
            "the width of a head is never cut\n"
            "  plan text.q: h@tp d@dp\n"
            "                    ^^^^\n"
            "  fix: cut h",
        ),
        (
            {"text.mlp": "f@tp.zigzag"},
            "inner dims are cut in contiguous blocks only\n"
            "  plan text.mlp: f@tp.zigzag\n"
            "                      ^^^^^^",
        ),
        (
            {"text.q": "h@tp d"},
            "text.q is split and text.k is not: a rank's query heads must meet their keys\n"
            "  plan splits\n"
            "  fix: name both; kv over the same axes as h",
        ),
        (
            {"text.q": "h@tp d", "text.k": "kv d"},
            "4 query heads over 2 ranks do not meet 2 key heads over 1\n"
            "  plan text.k: kv d\n"
            "               ^^^^\n"
            "  fix: kv over the same axes as h",
        ),
    ],
)
def test_a_split_that_cannot_be_says_so(splits, message):
    assert faults(PAIR, splits) == message


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            {"text.experts": "e@tp f"},
            "8 experts cannot be dealt to 3 ranks\n"
            "  plan text.experts: e@tp f\n"
            "                     ^^^^\n"
            "  fix: degrees 1, 2, 4, 8 work",
        ),
        (
            {"text.experts": "e f@(dp tp)"},
            "24 columns of an expert cannot be dealt to 9 ranks\n"
            "  plan text.experts: e f@(dp tp)\n"
            "                       ^^^^^^^^^\n"
            "  fix: degrees 1, 2, 3, 4, 6, 8, 12, 24 work",
        ),
        (
            {"text.vocab": "vocab@tp m"},
            "this inside has dims 'vocab'\n  plan text.vocab: vocab@tp m\n"
            "                            ^",
        ),
    ],
)
def test_experts_are_dealt_whole(splits, message):
    assert faults({"dp": 3, "tp": 3}, splits) == message


@pytest.mark.parametrize(
    ("key_heads", "fix"),
    [
        (2, "fix: degrees 1, 2 work; on Mesh(tp=(2, 2)), kv@tp.0"),
        (1, "fix: kv d, whole: every rank computes the one key head"),
    ],
)
def test_fewer_key_heads_than_ranks_are_offered_their_spelling(key_heads, fix):
    assert faults({"dp": 1, "tp": 4}, TP, key_heads=key_heads) == (
        f"{key_heads} heads cannot be dealt to 4 ranks\n"
        "  plan text.k: kv@tp d\n"
        "               ^^^^^\n"
        f"  {fix}"
    )


def test_each_rank_has_some_of_a_width_that_does_not_divide():
    # Blocks of 3, as torch.chunk cuts: 13 full ones, one of 1, none for the last two.
    assert faults({"dp": 1, "tp": 16}, {"text.mlp": "f@tp"}) == (
        "f of 40 over 16 ranks leaves 2 of them nothing to compute\n"
        "  plan text.mlp: f@tp\n"
        "                 ^^^^\n"
        "  fix: 14 ranks at most"
    )


@pytest.mark.parametrize(
    ("cut", "fix"), [("@(cp tp)", "@cp@tp"), ("@(cp tp).zigzag", "@cp.zigzag@tp.zigzag")]
)
def test_a_cut_that_cannot_be_undone_alone_is_offered_apart(cut, fix):
    modes = {"text": gather("cp tp")}
    splits = {"text.mlp": "f@tp"}
    assert faults(FOUR, splits, tokens=f"b@dp.home s{cut} m", attention=modes) == (
        "text.mlp is split over 'tp', which this cut joins with another axis\n"
        f"  plan text.tokens: b@dp.home s{cut} m\n"
        f"                               {'^' * len(cut)}\n"
        f"  fix: {fix}: the last cut is undone on the way in"
    )


def test_a_cut_that_is_not_the_last_is_pointed_at():
    modes = {"text": gather("cp tp")}
    splits = {"text.mlp": "f@tp"}
    assert faults(FOUR, splits, tokens="b@dp.home s@tp@cp m", attention=modes) == (
        "text.mlp is split over 'tp', whose cut is not the last one of 's'\n"
        "  plan text.tokens: b@dp.home s@tp@cp m\n"
        "                               ^^^\n"
        "  fix: put it behind the others, so that it can be undone on the way in"
    )


def test_a_mode_over_an_axis_whose_tokens_are_gathered_is_refused():
    modes = {"text": gather("tp")}
    assert faults(PAIR, TP, tokens="b@dp.home s@tp m", attention=modes) == (
        "attention of text works over 'tp', over which its heads are split and its tokens "
        "gathered\n"
        "  plan text.q: h@tp d\n"
        "                ^^^\n"
        "  fix: leave tp out of the mode"
    )


def test_rows_of_different_ranks_do_not_share_a_block():
    assert "over which text.mlp is split" in faults(
        PAIR, {"text.mlp": "f@tp"}, tokens="b@tp.home s m"
    )


def test_a_model_without_insides_is_told():
    class Bare:
        def __getattr__(self, name):
            return getattr(config(), name) if name != "insides" else self.missing()

        def missing(self):
            raise AttributeError

    plan = load_plan("plans/decoder_tp.py", 2)
    assert "says nothing of the insides of its blocks" in str(next(iter(plan.faults(Bare(), 2))))


def test_parts_and_their_storage_follow_from_the_splits():
    bound = load_plan("plans/decoder_tp_cp.py", 4).bind(config(), 4)
    assert (bound.copies, bound.divisor) == (1, 8)
    table = [line.split() for line in describe_storage(bound).splitlines()]
    found = {name.rpartition("layers.*")[2]: " ".join(told) for name, *told in table}
    attention, over = ".self_attn", "dim 0 over dp cp"
    assert found[f"{attention}.q_proj.weight"] == f"4 (h@tp d) m 32 64 {over} 1,024 -"
    assert found[f"{attention}.v_proj.weight"] == f"4 (kv@tp d) m 16 64 {over} 512 -"
    assert found[f"{attention}.o_proj.weight"] == f"4 m (h@tp d) 64 32 {over} 1,024 R S(0) S(1)"
    assert found[f"{attention}.q_norm.weight"] == f"4 whole 16 {over} tp 4 R S(0) S(0)"
    assert found[".mlp.gate_proj.weight"] == f"2 f@tp m 20 64 {over} 640 -"
    assert found[".mlp.experts.down_proj"] == f"2 whole 8 64 24 {over} tp 3,072 R S(0) S(0)"
    assert found[":"] == "2 gathers, over dp cp; over dp cp tp"


def test_each_block_of_a_fused_weight_is_cut_for_itself():
    splits = {"vision.q": "h@tp d"}
    layouts = {"vision.patches": "(img@dp.home s) c", "text.tokens": "b@dp.home s m"}
    plan = Plan(Mesh(dp=1, tp=4), {"**": fsdp("dp tp")}, layouts, splits=splits)
    part = plan.bind(config(), 4).parts.layouts["model.visual.blocks.0.attn.qkv.weight"]
    rows = part.indices(2)[0]  # the third of four heads of 8, in queries, keys and values
    assert rows.tolist() == [*range(16, 24), *range(48, 56), *range(80, 88)]


def bound_by_index(mesh, splits, tokens="b@dp.home s m", *, tied=False, **text):
    """A plan whose splits take rows by index, bound."""
    raw = tiny_raw(text=text, tie_word_embeddings=tied)
    layouts = {"vision.patches": "(img@dp.home s) c", "text.tokens": tokens}
    modes = {"text": gather("cp")} if "cp" in tokens else {}
    plan = Plan(Mesh(**mesh), {"**": fsdp(" ".join(mesh))}, layouts, modes, splits=splits)
    return plan.bind(Config.from_dict(raw), plan.mesh.size)


def stored(bound, name) -> tuple:
    how = bound.stored[name]
    return how.shape, how.dim, how.shard, how.beside


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_may_be_cut_unevenly_over_axes_of_the_tokens(tied):
    # Blocks as torch.chunk cuts 97: 25, 25, 25, 22; over two pairs of ranks of three: 49, 48.
    mesh, splits = {"dp": 2, "tp": 4}, {"text.vocab": "vocab@tp"}
    bound = bound_by_index(mesh, splits, tied=tied, vocab_size=97)
    cut = {n: layout.spec.text for n, layout in bound.parts.layouts.items()}
    embedding, head = "model.language_model.embed_tokens.weight", "lm_head.weight"
    assert cut == dict.fromkeys([embedding, *([] if tied else [head])], "vocab@tp m")
    rows = [bound.parts.layouts[embedding].indices(rank)[0] for rank in range(8)]
    assert [(r[0], len(r)) for r in rows[4:]] == [(0, 25), (25, 25), (50, 25), (75, 22)]
    assert stored(bound, embedding) == ((25, 64), 1, ("dp",), ("tp",))  # 25 is odd, 64 is not
    last = bound.seen_from(7)
    assert stored(last, embedding) == ((22, 64), 0, ("dp",), ("tp",))


def test_a_vocabulary_may_be_cut_over_all_ranks_and_leave_one_without():
    bound = bound_by_index({"dp": 8}, {"text.vocab": "vocab@dp"}, vocab_size=97)
    assert stored(bound.seen_from(7), "lm_head.weight") == ((6, 64), 0, (), ("dp",))
    small = layout_of_parts(bound, "vocab@dp m", vocab=9, m=64)
    assert small == [2, 2, 2, 2, 1, 0, 0, 0]


def layout_of_parts(bound, text, **sizes) -> list[int]:
    cut = layout(text, bound.mesh, where=None, **sizes)
    return [cut.local_shape(rank)[0] for rank in range(bound.mesh.size)]


def test_experts_are_cut_by_number_and_width_and_gate_and_up_each():
    bound = bound_by_index(
        {"dp": 1, "cp": 2, "tp": 2},
        {"text.experts": "e@cp f@tp"},
        tokens="b@dp.home s@cp m",  # not the last cut of a dim, and in nobody's way
    )
    experts = "model.language_model.layers.0.mlp.experts"
    gate_up = bound.parts.layouts[f"{experts}.gate_up_proj"]
    assert gate_up.spec.text == "e@cp (2 f@tp) m"
    numbers, columns, _ = gate_up.indices(1)  # first experts, second half of gate and of up
    assert numbers.tolist() == [0, 1, 2, 3]
    assert columns.tolist() == [*range(12, 24), *range(36, 48)]
    assert bound.parts.layouts[f"{experts}.down_proj"].spec.text == "e@cp m f@tp"
    assert stored(bound, f"{experts}.down_proj") == ((4, 64, 12), 0, ("dp",), ("cp", "tp"))
    router = "model.language_model.layers.0.mlp.gate.weight"
    assert stored(bound, router) == ((8, 64), 0, ("dp", "cp", "tp"), ())


def test_packing_moves_outside_what_is_undone_on_the_way_in():
    plan = load_plan("plans/decoder_tp_cp.py", 4).packed()
    assert plan.layouts["text.tokens"] == "(smp@dp.home s@cp.zigzag)@tp m"


@pytest.mark.parametrize(
    ("dense", "tokens", "regather", "remarks"),
    [
        ([1, 3], "b@dp.home s@tp m", ("text",), []),
        (
            [],
            "b@dp.home s@tp m",
            ("text",),
            ["text.mlp cuts nothing: no layer of this model has a parameter of text.mlp"],
        ),
        (
            [1, 3],
            "b@dp.home s m",
            ("text", "vision"),
            [
                "regather of text: no split of its blocks gathers text.tokens on the way in",
                "regather of vision: no split of its blocks gathers vision.patches on the way in",
            ],
        ),
    ],
)
def test_what_has_no_effect_is_remarked(dense, tokens, regather, remarks):
    layouts = {"vision.patches": "(img@dp.home@tp.balance s) c", "text.tokens": tokens}
    mesh, params = Mesh(dp=1, tp=2), {"**": fsdp("dp tp")}
    plan = Plan(mesh, params, layouts, splits=TP, regather=regather)
    model = Config.from_dict(tiny_raw(text={"mlp_only_layers": dense}))
    bound = plan.bind(model, 2)
    assert list(split_remarks(bound)) == remarks
    assert bound.facts()["entered tokens of text"] == "gathered again"


class Other:
    """A model that calls all of it otherwise: 8 searching heads, 2 answering ones, 12 wide."""

    def __getattr__(self, name):
        return getattr(config(), name)

    def insides(self):
        dims = {"text.search": "seek wide", "text.answer": "find wide"}
        sizes = {"seek": 8, "find": 2, "wide": 12, "m": 96}
        dealt, whole = {"seek": "seekers", "find": "finders"}, {"wide": "what a finder reads"}
        parameters = {"layer.search": "(seek wide) m", "layer.answer": "(find wide) m"}
        return {"text.attention": Inside("text", dims, sizes, parameters, dealt, whole)}


@pytest.mark.parametrize(
    ("mesh", "splits", "message"),
    [
        (
            {"dp": 1, "x": 3},
            {"text.search": "seek@x wide", "text.answer": "find wide"},
            "8 seekers cannot be dealt to 3 ranks\n"
            "  plan text.search: seek@x wide\n"
            "                    ^^^^^^\n"
            "  fix: degrees 1, 2, 4, 8 work",
        ),
        (
            {"dp": 1, "x": 4},
            {"text.search": "seek@x wide", "text.answer": "find@x wide"},
            "2 finders cannot be dealt to 4 ranks\n"
            "  plan text.answer: find@x wide\n"
            "                    ^^^^^^\n"
            "  fix: degrees 1, 2 work; on Mesh(x=(2, 2)), find@x.0",
        ),
        (
            {"dp": 1, "x": 2},
            {"text.search": "seek wide@x", "text.answer": "find wide"},
            "what a finder reads is never cut\n"
            "  plan text.search: seek wide@x\n"
            "                         ^^^^^^\n"
            "  fix: cut seek",
        ),
        (
            {"dp": 1, "x": 2},
            {"text.search": "seek@x wide"},
            "text.search is split and text.answer is not: a rank's query heads must meet their "
            "keys\n"
            "  plan splits\n"
            "  fix: name both; find over the same axes as seek",
        ),
        (
            {"dp": 1, "x": 4},
            {"text.search": "seek@x wide", "text.answer": "find wide"},
            "8 query heads over 4 ranks do not meet 2 key heads over 1\n"
            "  plan text.answer: find wide\n"
            "                    ^^^^^^^^^\n"
            "  fix: find@x.0 on Mesh(x=(2, 2)): each rank then has the key head of its query heads",
        ),
        (
            {"dp": 1, "y": 2, "x": 2},
            {"text.search": "seek@(y x) wide", "text.answer": "find@x wide"},
            "8 query heads over 4 ranks do not meet 2 key heads over 2\n"
            "  plan text.answer: find@x wide\n"
            "                    ^^^^^^^^^^^\n"
            "  fix: find@y: each rank then has the key head of its query heads",
        ),
    ],
)
def test_another_model_is_spoken_of_in_its_own_words(mesh, splits, message):
    shape = Mesh(**mesh)
    layouts = {"vision.patches": "(img@dp.home s) c", "text.tokens": "b@dp.home s m"}
    plan = Plan(shape, {"**": fsdp("dp")}, layouts, splits=splits)
    (found,) = plan.faults(Other(), shape.size)
    assert str(found) == message
