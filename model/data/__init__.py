"""From files to what a step computes with: rows, chats, images, and who reads which of them.

`rows` reads a file of rows, `chat` renders chats and says which tokens are learned, `images`
decodes, `sample` is one row in tokens. `loader` reads ahead and agrees between ranks, `inputs`
makes this rank's tensors, `positions` what depends on where a token or patch lies.
"""

from model.data.images import ImageReader
from model.data.inputs import ModelInputs, VisionInputs
from model.data.loader import DATA_ERRORS, Batch, Loader, MicroBatch, Reading
from model.data.rows import RowFile

__all__ = [
    "DATA_ERRORS",
    "Batch",
    "ImageReader",
    "Loader",
    "MicroBatch",
    "ModelInputs",
    "Reading",
    "RowFile",
    "VisionInputs",
]
