import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.loss import token_loss
from tests.tiny import Shapes
from vlshard import local_boundaries

AT = local_boundaries()


def problem(rows: int, vocab: int = 37, width: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, width, generator=draw).requires_grad_()
    head = torch.randn(vocab, width, generator=draw).requires_grad_()
    return hidden, head, torch.randint(vocab, (rows,), generator=draw)


@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 11, 1024])
def test_loss_equals_cross_entropy_whatever_the_chunk(chunk: int):
    hidden, head, targets = problem(10)
    labels = torch.tensor(16.0)
    got = token_loss(hidden, head, targets, labels, chunk=chunk, at=AT)
    logits = (hidden.double() @ head.double().T).detach().requires_grad_()
    want = F.cross_entropy(logits, targets, reduction="sum") / 16
    want.backward()
    got.backward()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad, (logits.grad @ head.double()).float())
    torch.testing.assert_close(head.grad, (logits.grad.T @ hidden.double()).float())


def test_loss_scales_its_gradients_by_what_comes_from_above():
    hidden, head, targets = problem(5)
    loss = token_loss(hidden, head, targets, torch.tensor(1.0), chunk=2, at=AT)
    once = torch.autograd.grad(loss, (hidden, head), retain_graph=True)
    thrice = torch.autograd.grad(3 * loss, (hidden, head))
    for one, three in zip(once, thrice, strict=True):
        torch.testing.assert_close(3 * one, three)


def test_loss_without_labels_is_zero_with_zero_gradients():
    hidden, head, targets = problem(0)
    loss = token_loss(hidden, head, targets, torch.tensor(1.0), at=AT)
    loss.backward()
    assert loss == 0
    assert hidden.grad.shape == (0, 12)
    assert torch.equal(head.grad, torch.zeros(37, 12))


@pytest.mark.parametrize("frozen", [0, 1])
def test_loss_leaves_frozen_inputs_alone(frozen: int):
    hidden, head, targets = problem(7)
    (hidden, head)[frozen].requires_grad_(False)
    token_loss(hidden, head, targets, torch.tensor(7.0), chunk=4, at=AT).backward()
    assert [x.grad is None for x in (hidden, head)] == [frozen == 0, frozen == 1]


def test_loss_in_bf16_sums_in_fp32():
    hidden, head, targets = problem(40)
    half, half_head = (x.detach().bfloat16().requires_grad_() for x in (hidden, head))
    got = token_loss(half, half_head, targets, torch.tensor(40.0), chunk=16, at=AT)
    logits = F.linear(half, half_head).float()
    got.backward()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, F.cross_entropy(logits, targets), rtol=1e-6, atol=0)
    assert (half.grad.dtype, half_head.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_loss_never_holds_more_than_a_chunk_of_logits():
    rows, vocab, width, chunk = 50, 4096, 12, 16
    hidden, head, targets = problem(rows, vocab, width)
    with Shapes() as seen:
        token_loss(hidden, head, targets, torch.tensor(50.0), chunk=chunk, at=AT).backward()
    weights = {(vocab, width), (width, vocab)}
    numel = {shape: torch.Size(shape).numel() for shape in seen.found - weights}
    assert max(numel.values()) == chunk * vocab
    assert (chunk, vocab) in numel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [8192, 20_000])
def test_head_gradient_in_half_precision_is_as_right_in_chunks_as_in_one(rows, dtype):
    """Both round the gradients of logits, then sum in fp32; the order moves few elements by an ulp.

    An fp32 sum of ``rows`` terms is right to rows * 2**-24 of the terms' size, 1.2e-3 at most; so
    at most every 400th element crosses a rounding border, by 2**-8 (bf16) of itself: 2**-8 / 20
    of the norm if all stood out alike, 2e-4, beside the 1e-3 to 3e-3 that rounding logits costs.
    """
    draw = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 16, generator=draw).to(dtype)
    head = (torch.randn(40, 16, generator=draw) * 0.5).to(dtype)
    targets = torch.randint(40, (rows,), generator=draw)

    def gradient(head: Tensor, hidden: Tensor, chunk: int) -> Tensor:
        head = head.detach().requires_grad_()
        token_loss(hidden, head, targets, torch.tensor(float(rows)), chunk=chunk, at=AT).backward()
        return head.grad.double()

    right = gradient(head.double(), hidden.double(), rows)
    one, chunks = (
        (gradient(head, hidden, chunk) - right).norm() / right.norm() for chunk in (rows, 1024)
    )
    assert one < 3e-3
    assert chunks < one + 2e-4
