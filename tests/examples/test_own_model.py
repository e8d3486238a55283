import re

import pytest
import torch
from jaxtyping import TypeCheckError, install_import_hook

from vlshard import MeshShape, Packing, use_mesh

EXAMPLE = "examples.own_model"


def prove(dims):
    """In a rank: what every choice of layouts is shown to equal, with annotations checked."""
    with install_import_hook(EXAMPLE, "beartype.beartype"):
        from examples import own_model
    lines = [own_model.prove(where) for where in own_model.CHOICES]
    assert [line[0].split(" on ")[1] for line in lines] == [dims] * 2
    return [line[1:] for line in lines], misplaced(own_model)


def misplaced(own_model):
    """What is said of sound that is not where its rows are."""
    ids, rows = torch.full((2, 4), own_model.SOUND), torch.zeros(2, 4, 8)
    try:
        with use_mesh(MeshShape(dp=2), 0, clip=Packing([4] * 4)):
            own_model.put_sound(rows, torch.zeros(6, 8), ids)
    except TypeCheckError as error:
        return str(error.__cause__.__cause__)
    return None


@pytest.mark.parametrize(("world", "dims"), [(1, "dp=1 cp=1"), (2, "dp=1 cp=2"), (4, "dp=2 cp=2")])
def test_a_model_of_ones_own_equals_one_process(world, dims, ranks):
    for lines, fault in ranks(world).run(prove, dims) if world > 1 else [prove(dims)]:
        for losses, gradients in lines:
            first, *_, last = re.findall(r"\d\.\d{3}", losses)
            assert float(last) < float(first) - 1
            assert gradients == "  59 gradients, those of one process"
        assert "'(clip@dp n)' is 6, expected 8 of 16" in fault
