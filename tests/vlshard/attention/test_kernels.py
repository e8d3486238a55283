"""Kernels by device: which is taken, what it is called with (by fakes), and the probe."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.tiny import tiny_config
from vlshard import PlanError, load_plan
from vlshard.attention.kernels import Kernel, attend_runs, device_kernel, probe
from vlshard.attention.runs import Runs, segmented_attention


def draw(rows, keys):
    g = torch.Generator().manual_seed(5)
    return [torch.randn(n, h, 16, generator=g) for n, h in ((rows, 4), (keys, 2), (keys, 2))]


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        ("cpu", torch.bfloat16, "scaled_dot_product_attention"),
        ("cuda", torch.bfloat16, "varlen_attn"),
        ("cuda", torch.float32, "scaled_dot_product_attention"),
        ("npu", torch.float16, "npu_fusion_attention"),
        ("npu", torch.float32, "scaled_dot_product_attention"),
    ],
)
def test_kernel_of_a_device(device, dtype, name):
    assert device_kernel(device, dtype).name == name


def packed_reference(q, k, v, ends_q, ends_k, causal):
    """What a packed kernel gives for these ends: sequence by sequence, by torch's own."""
    outs, begin_q, begin_k = [], 0, 0
    for end_q, end_k in zip(ends_q, ends_k, strict=True):
        runs = Runs((0,), (end_q - begin_q,), (0,), (end_k - begin_k,), causal)
        outs.append(segmented_attention(q[begin_q:end_q], k[begin_k:end_k], v[begin_k:end_k], runs))
        begin_q, begin_k = end_q, end_k
    return torch.cat(outs)


RUNS = {
    "segments": Runs.segments([3, 5, 1]),
    "causal rows": Runs.segments([4, 5], causal=True),
    "queries of one segment in two runs": Runs((0, 4), (4, 5), (2, 2), (6, 6)),
    "prefixes": Runs((0, 2), (2, 7), (0, 1), (4, 8), causal=True),
}


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_varlen_is_called_with_packed_sequences(runs, monkeypatch):
    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa):
        assert cu_q.dtype == cu_k.dtype == torch.int32 and enable_gqa
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        assert window_size in ((-1, 0), (-1, -1))
        ends = cu_q[1:].tolist(), cu_k[1:].tolist()
        return packed_reference(q, k, v, *ends, causal=window_size == (-1, 0))

    name = "torch.nn.attention.varlen"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(varlen_attn=varlen_attn))
    inputs = draw(9, 9)
    found = device_kernel("cuda", torch.bfloat16).attend(*inputs, runs)
    torch.testing.assert_close(found, segmented_attention(*inputs, runs))


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_npu_is_called_in_its_packed_layout(runs, monkeypatch):
    def fusion(q, k, v, head_num, layout, *, scale, actual_seq_qlen, actual_seq_kvlen, **more):
        assert (head_num, layout, scale) == (4, "TND", 0.25)
        assert bool(more) == runs.causal
        if more:
            assert more["sparse_mode"] == 3 and more["atten_mask"].shape == (2048, 2048)
            assert not more["atten_mask"][7, 7] and more["atten_mask"][7, 8]
        causal = "sparse_mode" in more
        return packed_reference(q, k, v, actual_seq_qlen, actual_seq_kvlen, causal), None

    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_fusion_attention=fusion))
    inputs = draw(9, 9)
    found = device_kernel("npu", torch.bfloat16).attend(*inputs, runs)
    torch.testing.assert_close(found, segmented_attention(*inputs, runs))


def test_no_query_calls_no_kernel():
    def dies(*_):
        raise AssertionError("called on nothing")

    q, k, v = draw(0, 3)
    assert attend_runs(q, k, v, Runs((), (), (), ()), Kernel("dies", dies)).shape == (0, 4, 16)


def causal(q, k, v, runs):
    return segmented_attention(q, k, v, Runs.segments(runs.q_lengths, causal=True))


def across(q, k, v, runs):
    return segmented_attention(q, k, v, Runs.segments([len(q)]))


def timid(q, k, v, runs):
    return segmented_attention(q / 1000, k, v, runs)


FAULTS = {
    "one way": (causal, "the first query of a segment did not see the segment's last key"),
    "across": (across, "queries saw a key of another segment"),
    "timid": (timid, "a key that outweighs all others did not give its value"),
    "half a row": (
        lambda q, k, v, runs: q[:4],
        "gave torch.float32 (4, 2, 16) for q of torch.float32 (8, 2, 16)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_kernel_that_is_wrong_is_refused_by_name(name):
    attend, fault = FAULTS[name]
    with pytest.raises(PlanError) as error:
        probe(Kernel(name, attend))
    assert str(error.value) == (
        f"attention kernel {name!r} cannot be used: {fault}\n"
        "  fix: a kernel that attends inside segments both ways, or none for the device's own"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_own_kernel_passes_the_probe(dtype):
    probe(Kernel("own", segmented_attention, "cpu", dtype))


def test_a_plan_tries_a_kernel_before_it_is_used():
    plan = load_plan("plans/single.py", 1)
    with pytest.raises(PlanError, match="attention kernel 'across' cannot be used"):
        plan.bind(tiny_config(), 1, kernel=Kernel("across", across))
    own = Kernel("own", segmented_attention)
    assert plan.bind(tiny_config(), 1, kernel=own).kernel is own
