"""What ``shard_model`` refuses, before anything is sharded."""

import pytest
from torch import nn

from vlshard import Mesh, PlanError, Storage, fsdp, replicate, shard_model


def model():
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return nn.ModuleDict({"embed": nn.Embedding(4, 2), "block": block})


ALL = {"embed": fsdp("dp"), "block": fsdp("dp"), "": fsdp("dp")}
WRONG = [
    ((ALL | {"": fsdp("tp")},), "unknown mesh axis 'tp'"),
    (({"blok": fsdp("dp"), **ALL},), "the model has no module 'blok' to be a unit; did you mean"),
    (({"embed": fsdp("dp")},), "the last unit is 'embed', not the root, \"\"\n  the root stores"),
    (({},), 'the last unit is nothing, not the root, ""'),
    (
        ({"block": fsdp("dp"), "block.0": fsdp("dp"), "": fsdp("dp")},),
        "unit 'block.0' comes after 'block', which it is a part of",
    ),
    ((ALL, ("embd",)), "the model has no module 'embd' to be a unit; did you mean"),
    ((ALL, ("block.1",)), "'block.1' only looks rows up, but is no unit of storages"),
    ((ALL,), "no process group: start the ranks with torchrun"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=str)
def test_what_cannot_be_stored_is_refused(given, message):
    storages, *lookups = given
    with pytest.raises(PlanError) as error:
        shard_model(model(), storages, Mesh(dp=2), lookups=lookups[0] if lookups else ())
    assert str(error.value).startswith(message)


def test_axes_that_are_not_named_are_copies():
    mesh = Mesh(dp=2, cp={"ring": 2, "ulysses": 2})
    assert replicate().on(mesh) == Storage((), ("dp", "cp.ring", "cp.ulysses"))
    assert fsdp("dp", replicate="cp.ring").on(mesh) == Storage(("dp",), ("cp.ring", "cp.ulysses"))
    assert fsdp("dp cp").on(mesh).on(mesh) == Storage(("dp", "cp.ring", "cp.ulysses"), ())
