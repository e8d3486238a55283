"""What runs with a shared vocabulary keep to: sizes, messages, results; and faults to be seen."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model.config.config import Config
from model.loss import row_parts, token_loss
from tests.batches import Builder, batches
from tests.dist.test_splits import SPREAD
from tests.dist.test_vocabulary import SEED, raw, reference
from tests.tiny import tiny_raw
from tests.training import Run
from vlshard import Mesh, layout
from vlshard.plan import TokenIds, bound_plan, lookup
from vlshard.plan.vocabulary import Vocabulary
from vlshard.pytree import tree_leaves

CASE = "mixed sizes"
ROWS, WIDTH, LABELS = 3001, 64, 40  # over two ranks: 1,501 and 1,500


class Watch(TorchDispatchMode):
    """Elements of the largest tensor that is made, and of what is sent; reads back to the host."""

    def __init__(self):
        super().__init__()
        self.made = self.sent = 0
        self.reads = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("c10d."):
            sizes = [x.numel() for x in tree_leaves(args[0]) if isinstance(x, Tensor)]
            self.sent = max([self.sent, *sizes])
        if "_local_scalar_dense" in name or "nonzero" in name:
            self.reads.append(name)
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.made = max([self.made, *sizes])
        return out


def watched(raw):
    """A step of the shipped plan, tables frozen and not: what was made, sent and read back."""
    found = []
    for freeze in ((), ("lm_head", "model.language_model.embed_tokens")):
        run = Run(Config.from_dict(raw), "plans/decoder_vocab.py", seed=SEED, freeze=freeze)
        batch = Builder(run.config, 1).add(20).add(5, (4, 6), 14).batch()
        (header,) = run.headers(batch)
        _, at, inputs = run.prepared(batch, header)
        assert len(inputs.text.targets) < LABELS
        with Watch() as watch:
            run.model(inputs, at).backward()
        found.append((watch.made, watch.sent, watch.reads))
    return found


def test_no_rank_holds_sends_or_reads_back_more_than_it_has_to(ranks):
    given = tiny_raw(text={**SPREAD, "vocab_size": ROWS}, vision=SPREAD)
    parts = (ROWS + 1) // 2, ROWS // 2
    for part, (trained, frozen) in zip(parts, ranks(2).run(watched, given), strict=True):
        for made, sent, reads in (trained, frozen):
            assert made == part * WIDTH  # this rank's part of a table, or its gradient
            assert sent < ROWS // 2 * WIDTH  # what the copies of a layer's gradients take
            assert reads == []


def predicted(plan, raw):
    """Of each labelled row: this rank's logits, what is predicted, and its target."""
    run, seen = Run(Config.from_dict(raw), plan, seed=SEED), []
    batch = batches(run.config)[CASE]
    (header,) = run.headers(batch)
    _, at, inputs = run.prepared(batch, header)

    def look(rows, head, targets, num_labels):
        logits = F.linear(rows, head)
        seen.extend((logits.detach(), at.argmax("text.vocab", logits), targets))
        return token_loss(rows, head, targets, num_labels, at=at)

    run.model(inputs, at, loss=look)
    return seen


def test_logits_are_columns_of_all_rows_and_predictions_ids(ranks):
    given = raw()
    logits, ids, targets = predicted(None, given)
    assert ids.tolist() == logits.argmax(-1).tolist()
    for place, found in enumerate(ranks(2).run(predicted, "plans/decoder_vocab.py", given)):
        columns = logits[:, :49] if place == 0 else logits[:, 49:]
        torch.testing.assert_close(found[0], columns, rtol=1e-4, atol=1e-5)
        assert (found[1].tolist(), found[2].tolist()) == (ids.tolist(), targets.tolist())


def merged_alone(width):
    """A lookup of three ranks without tokens, on parts of which the last is empty."""
    mesh = Mesh(tp=4)
    table = layout("vocab@tp", mesh, vocab=width)
    vocabulary = Vocabulary(table, ("tp",), (), mesh)
    nothing = TokenIds(np.empty(0, np.int64), np.empty(0, np.int64))
    at = vocabulary.plan(vocabulary.exchange(nothing))
    begin, end = at.part
    logits = torch.tensor([[1.0, 3, 3, 3, 3], [2, 1, 2, 2, 2], [-9, -8, -9, -8, -7]])[:, begin:end]
    wanted = torch.tensor([4, 0, 1])
    parts = row_parts(logits, at.columns(wanted))
    return (begin, end), at.argmax(logits).tolist(), at.merge(parts)


def test_parts_are_merged_alike_on_all_ranks_and_equal_logits_go_to_the_smallest_id(ranks):
    whole = torch.tensor([[1.0, 3, 3, 3, 3], [2, 1, 2, 2, 2], [-9, -8, -9, -8, -7]])
    found = ranks(4).run(merged_alone, 5)
    assert [part for part, *_ in found] == [(0, 2), (2, 4), (4, 5), (5, 5)]  # the last has none
    for _, ids, both in found:
        assert ids == [1, 0, 4]
        torch.testing.assert_close(both[:, 0], whole.logsumexp(-1))
        assert both[:, 1].tolist() == [3.0, 2.0, -8.0]
        assert torch.equal(both, found[0][2])


def loss_gradient_not_summed(patch):
    patch.setattr(lookup.Lookup, "leave", lambda self, x: x)


def labels_counted_per_rank(patch):
    split = bound_plan.spec_axes
    patch.setattr(
        bound_plan.BoundPlan,
        "copies",
        property(lambda self: self.mesh.size // self.mesh.span(split(self.tokens, self.mesh))),
    )


def parts_not_merged(patch):
    patch.setattr(lookup.Lookup, "merge", lambda self, parts: lookup.merge_parts(parts[None]))


def rows_of_others_not_entered(patch):
    patch.setattr(lookup.Lookup, "enter", lambda self, x: self.labelled(x).detach() + 0 * x.sum())


def padding_row_learns(patch):
    fetch = lookup.Lookup.fetch
    patch.setattr(lookup.Lookup, "fetch", lambda self, t, ids, _: fetch(self, t, ids, None))


MUTATIONS = (
    loss_gradient_not_summed,
    labels_counted_per_rank,
    parts_not_merged,
    rows_of_others_not_entered,
    padding_row_learns,
)


def mutated(path, raw, expected) -> list[str]:
    """The mutations of which nothing is seen in a step."""
    unseen = []
    for mutation in MUTATIONS:
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
            run = Run(Config.from_dict(raw), path, seed=SEED)
            found = run.probe(batches(run.config)[CASE], expected)
        if not found.faults and abs(found.loss / expected.loss - 1) < 1e-6:
            unseen.append(mutation.__name__)
    return unseen


def test_each_mutation_is_seen(ranks):
    expected = reference(False, (CASE,))[CASE]
    assert ranks(2).run(mutated, "plans/decoder_vocab.py", raw(), expected) == [[], []]
