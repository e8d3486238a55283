import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.moe import (
    Kept,
    Load,
    choose,
    expert_ends,
    load_balance,
    moe,
    refuse_widths,
    route,
    run_experts,
    shares_of,
    weighted_sums,
)
from model.params import MoeParams
from vlshard import local_boundaries

E, M, W, K = 8, 16, 24, 2
AT = local_boundaries()


def experts(seed: int = 0, dtype: torch.dtype = torch.float32) -> MoeParams:
    draw = torch.Generator().manual_seed(seed)
    shapes = (E, M), (E, M, W), (E, 2 * W, M)
    weights = ((0.3 * torch.randn(shape, generator=draw)).to(dtype) for shape in shapes)
    return MoeParams(*(weight.requires_grad_() for weight in weights))


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, M, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def one_by_one(params: MoeParams, x: Tensor) -> Tensor:
    """Token by token, expert by expert, in fp64."""
    router, gate_up, down = (
        weight.double() for weight in (params.router_w, params.gate_up, params.down)
    )
    rows = []
    for token in x.double():
        best = torch.softmax(router @ token, 0).topk(K)
        parts = [
            down[e] @ (F.silu(gate_up[e, :W] @ token) * (gate_up[e, W:] @ token))
            for e in best.indices
        ]
        shares = best.values / best.values.sum()
        rows.append(sum(share * part for share, part in zip(shares, parts, strict=True)))
    return torch.stack(rows)


def test_moe_equals_experts_one_by_one_with_all_gradients():
    params, x = experts(), tokens(13)
    out, _ = moe(params, x, torch.arange(len(x)), top_k=K, at=AT)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    inputs = (x, params.router_w, params.gate_up, params.down)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    want_out = one_by_one(params, x)
    want = torch.autograd.grad((want_out * weight).sum(), inputs)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-5)
    for mine, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5 * float(wanted.norm()))


def test_moe_on_no_token_keeps_zero_gradients():
    params, x = experts(), tokens(0)
    out, load = moe(params, x, torch.arange(len(x)), top_k=K, at=AT)
    out.sum().backward()
    assert out.shape == (0, M)
    assert x.grad.shape == (0, M)
    for weight in (params.router_w, params.gate_up, params.down):
        assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert load.tokens == 0


def test_moe_leaves_unchosen_experts_with_exactly_zero_gradients():
    params, x = experts(), tokens(1)
    out, load = moe(params, x, torch.arange(len(x)), top_k=K, at=AT)
    (out**2).sum().backward()
    unused = load.chosen == 0
    assert int(unused.sum()) == E - K
    for weight in (params.gate_up, params.down):
        assert not weight.grad[unused].any()
        assert weight.grad[~unused].flatten(1).any(1).all()


def test_moe_in_bf16_keeps_the_router_in_fp32():
    params = experts(dtype=torch.bfloat16)
    x = tokens(9).detach().bfloat16()
    out, _ = moe(params, x, torch.arange(len(x)), top_k=K, at=AT)
    assert route(params.router_w, x, torch.arange(len(x))).dtype == torch.float32
    assert out.dtype == torch.bfloat16
    want = one_by_one(params, x)
    assert (out.double() - want).norm() <= 0.02 * want.norm()  # bf16 rounds to 2**-8


def test_route_shares_sum_to_one_over_the_largest():
    params = experts()
    probs = route(params.router_w, tokens(20), torch.arange(20))
    best = choose(probs, torch.arange(20), num_rows=20, num_here=E, top_k=K, at=AT).experts
    torch.testing.assert_close(shares_of(probs, best).sum(-1), torch.ones(20))
    chosen = probs.gather(-1, best)
    kth = probs.sort(-1, descending=True).values[:, :K]
    torch.testing.assert_close(chosen, kth, rtol=0, atol=0)


def test_expert_ends_count_sorted_experts():
    ends = expert_ends(torch.tensor([0, 0, 2, 5, 5, 5]), 7)
    assert ends.dtype == torch.int32
    assert ends.tolist() == [2, 2, 3, 3, 3, 6, 6]


def test_load_counts_choices_and_probabilities():
    params, x = experts(), tokens(11)
    probs = route(params.router_w, x, torch.arange(len(x)))
    _, load = moe(params, x, torch.arange(len(x)), top_k=K, at=AT)
    counts = torch.bincount(probs.topk(K).indices.flatten(), minlength=E)
    assert load.chosen.tolist() == counts.tolist()
    torch.testing.assert_close(load.probs, probs.sum(0))
    assert load.tokens == 11


def test_a_choice_is_kept_and_shares_are_computed_anew():
    params, x, kept = experts(), tokens(7), Kept()
    first, _ = moe(params, x, torch.arange(len(x)), top_k=K, at=AT, kept=kept)
    chosen = kept.once(lambda: pytest.fail("chosen twice"))
    assert torch.equal(
        chosen.experts, route(params.router_w, x, torch.arange(len(x))).topk(K).indices
    )
    again, _ = moe(params, x, torch.arange(len(x)), top_k=K, at=AT, kept=kept)
    assert torch.equal(first, again)
    moved = MoeParams(-params.router_w, params.down, params.gate_up)
    out, _ = moe(
        moved, x, torch.arange(7), top_k=K, at=AT, kept=kept
    )  # the same experts, now the least probable
    shares = shares_of(route(moved.router_w, x, torch.arange(7)), chosen.experts)
    assert not torch.equal(out, first)
    torch.testing.assert_close(shares.sum(-1), torch.ones(7))


COUNTS = [0, 1, 7, 9, 0, 64, 3, 0]


def of_runs(params: MoeParams, rows: Tensor, weight: Tensor) -> list[Tensor]:
    """Results and gradients of each run of rows by products of its own, in the rows' dtype."""
    down, gate_up = (w.detach().clone().requires_grad_() for w in (params.down, params.gate_up))
    x = rows.detach().clone().requires_grad_()
    parts = []
    for e, run in enumerate(x.split(COUNTS)):
        gate, up = F.linear(run, gate_up[e]).chunk(2, dim=-1)
        parts.append(F.linear(F.silu(gate) * up, down[e]))
    out = torch.cat(parts)
    return [out, *torch.autograd.grad(out, (x, down, gate_up), weight)]


@pytest.mark.parametrize("expanded", [False, True])
def test_grouped_products_equal_single_ones(expanded):
    ends = torch.tensor(COUNTS).cumsum(0).int()
    x = tokens(sum(COUNTS)).detach()
    weight = torch.ones(1).expand(x.shape) if expanded else torch.randn_like(x)
    right = of_runs(
        MoeParams(*(w.double() for w in vars(experts()).values())), x.double(), weight.double()
    )
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, None)):
        params = experts(dtype=dtype)
        rows = x.to(dtype, copy=True).requires_grad_()
        out = run_experts(params.down, params.gate_up, rows, ends)
        if expanded:
            out.sum().backward()
        else:
            out.backward(weight.to(dtype))
        found = [out, rows.grad, params.down.grad, params.gate_up.grad]
        single = of_runs(params, x.to(dtype), weight.to(dtype))
        for mine, other, want in zip(found, single, right, strict=True):
            off, theirs = ((g.double() - want).norm() / want.norm() for g in (mine, other))
            assert off <= (2 * theirs if limit is None else limit)
        for gradient in found[2:]:
            assert not gradient[torch.tensor(COUNTS) == 0].any()


def test_weighted_sums_are_taken_in_fp32_and_rounded_once():
    # 256 + 3 = 259 lies between 258 and 260 in bf16: summed in bf16, 256 stays.
    rows = torch.tensor([[1.0], [256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    place, begins = torch.tensor([1, 0, 2, 3]), torch.tensor([0, 0, 4])
    out = weighted_sums(rows, torch.ones(4), place, begins)
    assert out.dtype == torch.bfloat16
    assert out.flatten().tolist() == [0.0, 260.0, 0.0]


def test_load_balance_adds_layers_before_it_divides():
    two = [
        Load(torch.tensor([3.0, 1.0]), torch.tensor([1.5, 0.5]), torch.tensor(2.0)),
        Load(torch.tensor([2.0, 2.0]), torch.tensor([1.25, 0.75]), torch.tensor(2.0)),
    ]
    assert load_balance(two) == 2 * (5 / 4 * 2.75 / 4 + 3 / 4 * 1.25 / 4)


@pytest.mark.parametrize(
    ("dtype", "widths", "message"),
    [
        (torch.float32, {"a": 64, "b": 6, "c": 5}, "multiples of 4 in torch.float32, got b=6, c=5"),
        (torch.bfloat16, {"a": 64, "b": 12}, "multiples of 8 in torch.bfloat16, got b=12"),
    ],
)
def test_refuse_widths_names_the_wrong_ones(dtype, widths, message):
    with pytest.raises(ValueError, match=message):
        refuse_widths(widths, dtype)
    refuse_widths({"a": 64, "b": 24}, dtype)
