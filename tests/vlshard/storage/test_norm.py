import math

import pytest
import torch

from vlshard.comm.agreement import AgreedError, agree, raise_any, together
from vlshard.storage.norm import clip_gradients, grad_norm


def with_gradient(values):
    parameter = torch.nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_norm_takes_all_gradients_together():
    parameters = [with_gradient([3.0]), torch.nn.Parameter(torch.ones(2)), with_gradient([0.0, 4])]
    assert grad_norm(parameters).item() == 5.0


def test_norm_without_any_gradient_is_zero():
    assert grad_norm([torch.nn.Parameter(torch.ones(2))]).item() == 0.0
    assert grad_norm([]).item() == 0.0


def test_norm_of_many_equal_elements_is_exact():
    parameter = with_gradient([0.1] * 1_000_001)
    expected = parameter.grad.double().norm().item()
    assert grad_norm([parameter]).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("factor", [1.0, 1e20, 1e-25])
def test_norm_of_complex_gradients_takes_both_parts(factor):
    parameter = torch.nn.Parameter(torch.zeros(300, dtype=torch.complex64))
    parameter.grad = torch.full((300,), (3 + 4j) * factor, dtype=torch.complex64)
    norm = clip_gradients([parameter], 1.0).item()
    assert norm == pytest.approx(5 * 300**0.5 * factor, rel=1e-6, abs=0)
    if norm > 1:
        expected = torch.full((300,), (0.6 + 0.8j) / 300**0.5, dtype=torch.complex64)
        torch.testing.assert_close(parameter.grad, expected)


def test_clip_scales_every_gradient_of_an_iterator():
    first, second = with_gradient([3.0]), with_gradient([0.0, -4.0])
    norm = clip_gradients((p for p in (first, second)), max_norm=1.0)
    assert norm.item() == 5.0
    torch.testing.assert_close(first.grad, torch.tensor([0.6]))
    torch.testing.assert_close(second.grad, torch.tensor([0.0, -0.8]))


def test_clip_equals_torch():
    values = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).tolist()
    ours, theirs = ([with_gradient(row) for row in values] for _ in range(2))
    norm = clip_gradients(ours, 0.5)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs])


def test_clip_leaves_a_small_gradient_alone():
    parameter = with_gradient([0.3, 0.4])
    clip_gradients([parameter], max_norm=1.0)
    assert torch.equal(parameter.grad, torch.tensor([0.3, 0.4]))


def test_clip_keeps_bfloat16():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    assert clip_gradients([parameter], max_norm=1.0).item() == 5.0
    assert parameter.grad.dtype == torch.bfloat16


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("value", "count", "norm", "clipped"),
    [
        (1e20, 256, 1.6e21, 0.0625),
        (-1e20, 100, 1e21, -0.1),  # shorter than one run
        (1e30, 10_000, 1e32, 0.01),
        (LARGEST, 256, float("inf"), 0.0625),  # the norm is no float32, the factor a float64
        (1e-25, 400, 2e-24, 1e-25),  # its squares are no float32
        (2**-147, 400, 20 * 2**-147, 2**-147),
    ],
)
def test_norm_and_clip_neither_overflow_nor_vanish(value, count, norm, clipped):
    parameter = with_gradient([value] * count)
    assert grad_norm([parameter]).item() == pytest.approx(norm, rel=1e-6, abs=0)
    clip_gradients([parameter], 1.0)
    assert parameter.grad.tolist() == pytest.approx([clipped] * count, rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clip_of_half_precision_takes_no_rounded_factor(dtype):
    parameter = torch.nn.Parameter(torch.zeros(10_000, dtype=dtype))
    parameter.grad = torch.full((10_000,), 60_000.0, dtype=dtype)
    assert clip_gradients([parameter], 0.1).item() == pytest.approx(6e6, rel=0.004)
    assert torch.equal(parameter.grad, torch.full((10_000,), 0.001, dtype=dtype))


def test_norm_takes_gradients_of_any_size_in_float64():
    parameter = torch.nn.Parameter(torch.zeros(1024, dtype=torch.float64))
    parameter.grad = torch.full((1024,), 1e200, dtype=torch.float64)
    assert clip_gradients([parameter, with_gradient([1.0])], 1.0).item() == math.inf  # as float32
    torch.testing.assert_close(parameter.grad, torch.full((1024,), 1 / 32, dtype=torch.float64))


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_clip_leaves_what_is_not_finite_to_be_found(value):
    first, second = with_gradient([3.0, value]), with_gradient([4.0])
    norm = clip_gradients([first, second], 1.0).item()
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf
    assert first.grad[0] == 3.0 and second.grad[0] == 4.0 and not first.grad[1].isfinite()


def test_agree_alone_gives_what_json_makes_of_it():
    assert agree({"a": (1, None)}) == [{"a": [1, None]}]


def test_raise_any_names_different_errors_once():
    raise_any([None, None])
    with pytest.raises(AgreedError) as error:
        raise_any(["row 3 is empty", None, "row 5 is empty", "row 3 is empty"])
    assert str(error.value) == "row 3 is empty\nrow 5 is empty"


def test_raise_any_counts_the_rest():
    with pytest.raises(AgreedError, match=r"error 7\n\.\.\. and 2 more errors$"):
        raise_any([f"error {i}" for i in range(10)])


def test_together_tells_expected_errors_and_passes_others_on():
    with pytest.raises(AgreedError, match="no such row"), together(LookupError):
        raise IndexError("no such row")
    with pytest.raises(TypeError, match="a mistake"), together(LookupError):
        raise TypeError("a mistake")
