"""What runs with experts over ranks keep: choices, totals, and faults that tests must see."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from model import moe
from model.config.config import Config
from model.modules import refuse_expert_widths
from model.moe import Load, load_balance, total_load
from tests.batches import batches
from tests.dist.test_expert_splits import (
    ROWS,
    SEED,
    flatten_routers,
    model_of,
    write_plan,
)
from tests.training import Run
from vlshard import Mesh, Plan, fsdp
from vlshard.comm import RowMove, dispatch
from vlshard.plan import Share, StepBoundaries

APART, FOLDED = (2, "over ranks with rows of their own"), (4, "over all, zigzag")
BATCH = "mixed sizes"


def watched(path, made, every):
    """A step with routers that cannot tell: how often it chose and asked, and what came of it."""
    run = Run(Config.from_dict(made), path, seed=SEED, checkpoint={"text": every})
    flatten_routers(run.model)
    counts = dict.fromkeys(("topk", "visits", "read"), 0)

    def counted(name, call):
        def count(*args, **kwargs):
            counts[name] += 1
            return call(*args, **kwargs)

        return count

    def model(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            for name, owner in (("topk", torch.Tensor), ("visits", dispatch.Hosts)):
                patch.setattr(owner, name, counted(name, getattr(owner, name)))
            for reading in ("tolist", "item", "__int__", "__bool__", "__float__"):
                patch.setattr(torch.Tensor, reading, counted("read", getattr(torch.Tensor, reading)))
            loss = forward(*args, **kwargs)
            loss.backward()
        return loss.detach()

    forward, run.model.forward = run.model.forward, model
    loss = run.forward_backward(batches(run.config)[BATCH])
    return counts, loss, {name: g for name, g in run.raw_gradients().items() if g is not None}


def test_a_recompute_neither_chooses_nor_asks_and_gives_the_same_bits(ranks, tmp_path):
    path = write_plan(tmp_path / "plan.py", FOLDED)
    once, again = (ranks(4).run(watched, path, model_of(FOLDED), every) for every in (0, 1))
    for (counts, loss, gradients), (recomputed, loss_again, gradients_again) in zip(
        once, again, strict=True
    ):
        assert counts == recomputed == {"topk": 2, "visits": 2, "read": 2}
        assert loss == loss_again
        assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)


def balanced(chosen, probs, tokens):
    """The load balance of all ranks' tokens, and the gradient of this rank's probabilities."""
    mesh = Mesh(dp=2)
    nothing = np.empty(0, np.int64)
    share = Share(nothing, nothing, nothing, visual=False)
    at = StepBoundaries(share, {}, RowMove(None, None, 1, 1), mesh=mesh)
    rank = dist.get_rank()
    mine = torch.tensor(probs[rank], requires_grad=True)
    load = Load(torch.tensor(chosen[rank]), mine, torch.tensor(tokens[rank]))
    total, count = total_load([load], at=at)
    balance = load_balance([total])
    (balance / count).backward()
    return float(balance.detach()), float(count.detach()), mine.grad.tolist()


def test_the_auxiliary_loss_is_of_all_ranks_tokens():
    # By hand: half of the choices each, probabilities .8 / 2 each: 4 (.5 .4 + .5 .4) = 1.6; one
    # token alone, chosen 1 and .7 probable, 2.8. A gradient is 4 x chosen / tokens / tokens.
    a, b = ([1.0, 0, 0, 0], [0.7, 0.1, 0.1, 0.1]), ([0, 1.0, 0, 0], [0.1, 0.7, 0.1, 0.1])
    for one in (a, b):
        load = Load(*map(torch.tensor, one), torch.tensor(1.0))
        assert float(load_balance([load])) == pytest.approx(2.8)


def test_the_auxiliary_loss_over_ranks(ranks):
    chosen = [[1.0, 0, 0, 0], [0, 1.0, 0, 0]]
    probs = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1]]
    for value, count, gradient in ranks(2).run(balanced, chosen, probs, [1.0, 1.0]):
        assert value == pytest.approx(1.6)
        assert count == 2
        assert gradient == pytest.approx([1.0, 1.0, 0, 0])
    nothing = [[0.0] * 4] * 2
    assert ranks(2).run(balanced, nothing, nothing, [0.0, 0.0]) == [(0.0, 2.0, [0.0] * 4)] * 2


def with_aux(path, made, expected=None):
    run = Run(Config.from_dict(made), path, seed=SEED, aux_loss=True)
    found = run.probe(batches(run.config)[BATCH], expected)
    return found, [float(balance) for balance in run.balances]


@pytest.mark.parametrize(
    "key", [APART, (2, "of cut tokens, with attention, recomputed"), (2, "where tokens are whole")],
    ids=lambda key: key[1],
)
def test_the_auxiliary_loss_is_the_same_under_a_plan(key, ranks, tmp_path):
    expected, (balance,) = with_aux(None, model_of(key))
    path = write_plan(tmp_path / "plan.py", key)
    for found, (value,) in ranks(2).run(with_aux, path, model_of(key), expected):
        assert value == pytest.approx(balance, rel=1e-6)
        assert found.faults == []
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)


def gradients_times_ranks(patch):
    run = moe.run_experts

    def scaled(down, gate_up, *rest):
        return run(2 * down - down.detach(), 2 * gate_up - gate_up.detach(), *rest)

    patch.setattr(moe, "run_experts", scaled)


def shares_without_gradient(patch):
    whole = dispatch.Visits.dispatch
    patch.setattr(dispatch.Visits, "dispatch", lambda self, x, s: whole(self, x, s.detach()))


def a_row_home_twice(patch):
    whole = dispatch.Visits.combine
    patch.setattr(dispatch.Visits, "combine", lambda self, y: whole(self, y + y))


MUTATIONS = (gradients_times_ranks, shares_without_gradient, a_row_home_twice)


def mutated(path, made, number, expected):
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[number](patch)
        run = Run(Config.from_dict(made), path, seed=SEED)
        found = run.probe(batches(run.config)[BATCH], expected)
    return bool(found.faults) or abs(found.loss / expected.loss - 1) > 1e-6


@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_each_mutation_is_seen(number, ranks, tmp_path):
    path = write_plan(tmp_path / "plan.py", APART)
    reference = Run(Config.from_dict(model_of(APART)), None, seed=SEED)
    expected = reference.probe(batches(reference.config)[BATCH])
    seen = ranks(2).run(mutated, path, model_of(APART), number, expected)
    assert seen == [True, True]


def bound(mesh, split, **text):
    made = model_of(APART)
    made["text_config"] |= text
    layouts = {"vision.patches": "(img@dp.home s) c", "text.tokens": ROWS}
    plan = Plan(mesh, {"**": fsdp(" ".join(mesh.sizes))}, layouts, splits={"text.experts": split})
    return plan.bind(Config.from_dict(made), mesh.size)


@pytest.mark.parametrize(
    ("ranks_of_width", "dtype", "told"),
    [
        (2, torch.bfloat16, "12 columns on a rank: 24 bytes in torch.bfloat16"),
        (4, torch.float32, "6 columns on a rank: 24 bytes in torch.float32"),
    ],
)
def test_a_width_that_the_grouped_product_cannot_take_is_refused(ranks_of_width, dtype, told):
    found = bound(Mesh(dp=1, tp=ranks_of_width), "e f@tp")
    with pytest.raises(ValueError, match=told) as error:
        refuse_expert_widths(found.config, dtype, found.parts)
    assert "moe_intermediate_size=24, cut e m f@tp" in str(error.value)


def test_experts_that_do_not_divide_by_their_ranks_are_stored_along_a_later_dim():
    # Two experts of eight over four ranks of dp: by number they would be padded to four.
    found = bound(Mesh(dp=4, tp=4), "e@tp f")
    gate_up = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    how = found.stored[gate_up]
    assert (how.shape, how.dim, how.shard, how.beside) == ((2, 48, 64), 1, ("dp",), ("tp",))
