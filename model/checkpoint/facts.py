"""What tells the weights of a folder from others, found by reading a little of them."""

from hashlib import blake2b
from pathlib import Path

import numpy as np

from model.checkpoint.headers import has_weights

BLOCKS, BLOCK = 64, 4096  # of a file of weights


def weights_facts(folder: Path) -> dict[str, object]:
    """Size and checksum of each file of weights, by name.

    Args:
      folder: of the model.
    """
    if not has_weights(folder):
        return {"weights": "none, so new ones are made"}
    files = sorted(path for path in folder.glob("*.safetensors*") if path.is_file())
    return {"weights": "loaded", **{path.name: file_facts(path) for path in files}}


def file_facts(path: Path) -> str:
    """Size of a file, and a checksum of its size, its header and blocks spread evenly over it."""
    found, size = blake2b(digest_size=8), path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        file.seek(0)
        found.update(size.to_bytes(8, "little") + file.read(8 + min(header, size)))
        for place in np.linspace(0, max(size - BLOCK, 0), BLOCKS).astype(np.int64).tolist():
            file.seek(place)
            found.update(file.read(BLOCK))
    return f"{size} bytes, checksum {found.hexdigest()}"
