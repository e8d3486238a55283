import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from examples import own_loop
from model.training.launch import join_ranks
from tests.hf_oracle import hf_model
from tests.tiny import image, tiny_raw

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder, and rows of which the first has an image of 4 x 6 patches."""
    path, draw = tmp_path_factory.mktemp("loop"), np.random.default_rng(0)
    hf_model(tiny_raw(), seed=1).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    pixels = draw.integers(0, 256, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path / "a.png")
    with (path / "rows.jsonl").open("w") as file:
        for more in ([*image((1, 4, 6))], [], []):
            ids = [*more, *draw.integers(1, 80, 6).tolist()]
            row = {"input_ids": ids, "labels": [-100] * 5 + ids[5:]}
            row["labels"] = [token if token < 80 else -100 for token in row["labels"]]
            file.write(json.dumps(row | {"images": ["a.png"] if more else []}) + "\n")
    return path


def losses(plan, folder):
    cpu = torch.device("cpu")
    return [*own_loop.train(cpu, plan, str(folder), str(folder / "rows.jsonl"), steps=3, batch=3)]


def alone(folder):
    """In this process."""
    join_ranks("cpu")
    try:
        return losses("plans/single.py", folder)
    finally:
        dist.destroy_process_group()


def test_a_loop_of_ones_own_trains_as_one_process(folder, ranks):
    wanted = alone(folder)
    assert wanted[0] > wanted[1] > wanted[2]
    for found in ranks(2).run(losses, "plans/vision_cp_ulysses.py", folder):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_the_loss_is_smoothed():
    draw = torch.Generator().manual_seed(0)
    states, head = (torch.randn(3, 4, generator=draw), torch.randn(5, 4, generator=draw))
    found = own_loop.smoothed(states, head, torch.tensor([1, 0, 4]), torch.tensor(6.0))
    logs = (states @ head.T).log_softmax(-1)
    picked = -logs[[0, 1, 2], [1, 0, 4]].sum()
    torch.testing.assert_close(found, (0.9 * picked - 0.1 * logs.mean(-1).sum()) / 6)
    none = own_loop.smoothed(states[:0], head, torch.tensor([], dtype=int), torch.tensor(6.0))
    assert none == 0
