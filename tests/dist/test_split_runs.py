"""What runs under splits keep: weights bit for bit, equal copies; and faults that tests must see."""

import inspect

import pytest
import torch
from safetensors.torch import load_file

from model import text
from model.checkpoint import load_checkpoint, save_checkpoint
from model.config.config import Config
from model.modules.init import initialize
from tests.batches import batches
from tests.dist.test_splits import HOME, PLANS, SEED, raw, write_plan
from tests.training import Run, full
from vlshard.plan import bound_plan, doors, plan
from vlshard.storage import parameters

CUT = (2, "vision and text, both cut")
BATCH = "mixed sizes"


def saved_and_loaded(path, raw, folder):
    """Write a folder under splits, read it into other weights; the names that are not as before."""
    config = Config.from_dict(raw)
    run, other = Run(config, path, seed=SEED), Run(config, path, seed=SEED + 1)
    layout = "transposed"  # as the model has them
    save_checkpoint(run.model, folder, config, expert_layout=layout, parts=run.parts)
    load_checkpoint(other.model, folder, config, parts=other.parts)
    pairs = zip(run.model.named_parameters(), other.model.parameters(), strict=True)
    return [name for (name, one), two in pairs if not torch.equal(full(one), full(two))]


def test_weights_are_written_and_read_bit_for_bit(ranks, tmp_path):
    path, folder = write_plan(tmp_path / "split.py", CUT), tmp_path / "saved"
    assert ranks(2).run(saved_and_loaded, path, raw(), str(folder)) == [[], []]
    config, stored = Config.from_dict(raw()), load_file(folder / "model.safetensors")
    assert stored.keys() == config.parameter_shapes().keys()
    for name, shape in config.parameter_shapes().items():
        assert torch.equal(stored[name], initialize(name, shape, config, SEED)), name


@pytest.mark.parametrize("split", ["vocab@tp", "vocab@(dp tp)"])
def test_tables_and_experts_are_written_and_read_bit_for_bit(split, ranks, tmp_path):
    key = (4, split)
    made = {**raw(), "tie_word_embeddings": split == "vocab@tp"}
    made["text_config"]["vocab_size"] = 97
    splits = {"text.vocab": split, "text.experts": "e@dp f@tp"}
    PLANS[key] = ("dp=2, tp=2", splits, HOME, "b@dp.home s m", "{}")
    path, folder = write_plan(tmp_path / "split.py", key), tmp_path / "saved"
    del PLANS[key]
    assert ranks(4).run(saved_and_loaded, path, made, str(folder)) == [[]] * 4
    config, stored = Config.from_dict(made), load_file(folder / "model.safetensors")
    assert stored.keys() == config.parameter_shapes().keys()
    for name, shape in config.parameter_shapes().items():
        assert torch.equal(stored[name], initialize(name, shape, config, SEED)), name


def wrong_copies(patch):
    patch.setattr(bound_plan.BoundPlan, "copies", 1)


def leave_without_its_sum(patch):
    patch.setattr(doors.Door, "leave", lambda self, x: x)


def bias_on_every_rank(patch):
    source = inspect.getsource(text.text_attention)
    before, after = "F.linear(out, params.out.w))", "F.linear(out, params.out.w, params.out.b))"
    assert source.count(before) == 1
    names = dict(vars(text))
    whole = source.replace(before, after).replace("else out + params.out.b", "else out")
    exec(whole, names)
    patch.setattr(text, "text_attention", names["text_attention"])


def keys_paired_by_position(patch):
    patch.setattr(plan, "check_doors", lambda *_: ())


def copied_gradient_not_summed(patch):
    stored, store = parameters.StoredParameter, parameters.store

    def alone(shape, storage, mesh, part=None):
        how = store(shape, storage, mesh, part)
        beside = (*how.beside, *how.replicate)
        return stored(how.shape, how.shard, (), beside, how.dim)

    patch.setattr(parameters, "store", alone)


MUTATIONS = {
    wrong_copies: {},
    leave_without_its_sum: {},
    bias_on_every_rank: {},
    keys_paired_by_position: {"splits": {"text.q": "h@tp d", "text.k": "kv d"}},
    copied_gradient_not_summed: {"params": '{"**": fsdp("dp")}'},
}


def mutated(path, raw, name, expected) -> bool:
    """Whether anything of a step is seen to be off."""
    mutation = next(change for change in MUTATIONS if change.__name__ == name)
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        run = Run(Config.from_dict(raw), path, seed=SEED)
        found = run.probe(batches(run.config)[BATCH], expected)
    return bool(found.faults) or abs(found.loss / expected.loss - 1) > 1e-6


def test_each_mutation_is_seen(ranks, tmp_path):
    reference = Run(Config.from_dict(raw()), None, seed=SEED)
    expected = reference.probe(batches(reference.config)[BATCH])
    mesh, splits, patches, tokens, modes = PLANS[(2, "tokens whole over tp")]
    for mutation, fields in MUTATIONS.items():
        key = (2, mutation.__name__)
        given = fields.get("splits", splits)
        PLANS[key] = (mesh, given, patches, tokens, modes, {**fields, "splits": given})
        path = write_plan(tmp_path / f"{mutation.__name__}.py", key)
        del PLANS[key]
        seen = ranks(2).run(mutated, path, raw(), mutation.__name__, expected)
        assert seen == [True, True], mutation.__name__
