"""Split blocks in two precisions: what is whole over ranks has the same bits on all of them."""

import hashlib
import math

import pytest
import torch
import torch.distributed as dist

from model import moe, text
from model.config.config import Config
from tests.batches import batches
from tests.dist.test_splits import raw, write_plan
from tests.training import Run, full

SEED = 3
WHOLE, COPIED = (2, "tokens whole over tp"), (4, "tp2 dp2, replicated")
ROUNDED = ("mixed sizes", "text only", "one sample, one image", "unequal token counts")
DTYPES = (torch.float32, torch.bfloat16)


def bits(x: torch.Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def told(path, raw, dtype) -> dict[str, list[str]]:
    """Bits of each norm's output and router's choice in a step, and of this rank's loss term."""
    run, found = Run(Config.from_dict(raw), path, seed=SEED, dtype=dtype), {"norms": [], "choices": []}
    norm, choose = text.rms_norm, moe.choose

    def normed(x, *args, **kwargs):
        out = norm(x, *args, **kwargs)
        if out.shape[-1] == run.config.text.hidden_size:  # else of heads, which a rank has of its own
            found["norms"].append(bits(out))
        return out

    def chosen(*args, **kwargs):
        out = choose(*args, **kwargs)
        found["choices"].append(bits(out.experts))
        return out

    batch = batches(run.config)["mixed sizes"]
    (header,) = run.headers(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "rms_norm", normed)
        patch.setattr(moe, "choose", chosen)
        loss, _ = run.one_forward_backward(batch, header, run.bound.step(header))
    return {**found, "loss": [bits(loss.reshape(1))]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_choices_and_loss_have_the_same_bits_where_tokens_are_whole(dtype, ranks, tmp_path):
    one, two = ranks(2).run(told, write_plan(tmp_path / "split.py", WHOLE), raw(), dtype)
    assert one == two
    assert {name: len(found) for name, found in one.items()} == {"norms": 8, "choices": 2, "loss": 1}


def copies_that_differ(path, raw, dtype) -> list[str]:
    """Three steps of AdamW; gradients and weights that are not bit-identical where they are copies."""
    run, odd = Run(Config.from_dict(raw), path, seed=SEED, dtype=dtype), []
    made = batches(run.config)

    def compare(step):
        for name, parameter in run.model.named_parameters():
            beside = run.bound.stored[name].beside
            over = [axis for axis in ("dp", "tp") if axis not in beside]
            same = run.bound.mesh.peers(over, dist.get_rank())
            for kind, x in (("weight", parameter.detach()), ("gradient", parameter.grad)):
                if x is None:
                    continue
                local = full(x).contiguous()
                held = [torch.empty_like(local) for _ in range(dist.get_world_size())]
                dist.all_gather(held, local)
                if not all(torch.equal(local, held[rank]) for rank in same):
                    odd.append(f"{kind} of {name} after step {step}")

    run.train([made["mixed sizes"], made["text only"]], steps=3, weight_decay=0.1, after=compare)
    return odd


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_stay_bit_identical(dtype, ranks, tmp_path):
    path = write_plan(tmp_path / "split.py", COPIED)
    assert ranks(4).run(copies_that_differ, path, raw(), dtype, timeout=120) == [[]] * 4


def rounded(plan, raw, dtype) -> list[tuple]:
    """Loss and gradients of several batches."""
    run = Run(Config.from_dict(raw), plan, seed=SEED, dtype=dtype)
    made = batches(run.config)
    found = [run.probe(made[name]) for name in ROUNDED]
    return [(one.loss, {n: g for n, g in one.gradients.items() if g is not None}) for one in found]


def errors(found, exact) -> tuple[float, float]:
    """Root mean squares over batches of the relative errors of loss and of all gradients."""
    losses, gradients = [], []
    for (loss, mine), (right, wanted) in zip(found, exact, strict=True):
        losses.append((loss - right) / right)
        off = [float((mine[name].double() - g.double()).norm()) for name, g in wanted.items()]
        gradients.append(math.hypot(*off) / math.hypot(*(float(g.norm()) for g in wanted.values())))
    return tuple(math.hypot(*each) / len(found) ** 0.5 for each in (losses, gradients))


def test_bf16_is_at_most_twice_as_far_from_fp32_as_in_one_process(ranks, tmp_path):
    # One batch's loss may be close by luck, in one process or in two, so several are taken.
    exact, alone = (rounded(None, raw(), dtype) for dtype in DTYPES)
    limits = errors(alone, exact)
    path = write_plan(tmp_path / "split.py", WHOLE)
    found = errors(ranks(2).run(rounded, path, raw(), torch.bfloat16, timeout=120)[0], exact)
    assert all(0 < mine <= 2 * one for mine, one in zip(found, limits, strict=True)), (found, limits)
