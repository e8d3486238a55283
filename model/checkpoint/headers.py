"""What lies in a folder of safetensors files, read from headers and index; no tensor is touched."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from model.config import OddFileError, odd_file, parse_json, read_json
from vlshard.language import clipped

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "model*.bin", "*.pth", "*.ckpt")
WEIGHT_ENDINGS = (
    ".bin .ckpt .distcp .gguf .ggml .h5 .keras .llamafile .msgpack .npy .npz .nemo .onnx .ot"
    " .pdparams .pickle .pkl .pt .pt2 .pth .safetensors .tar .tflite .torch"
).split()


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written, or that does not fit the model."""

    @classmethod
    def listing(cls, folder: Path, problems: Iterable[str]) -> "CheckpointError":
        """One error for all problems of a folder."""
        lines = [clipped(problem, 400) for problem in problems]
        return cls("\n  ".join([f"{folder}: this checkpoint cannot be used", *lines]))


@dataclass(frozen=True)
class Stored:
    """One tensor on disk.

    Attributes:
      file: name of its file in the folder.
      dtype: as the format names it: BF16, F32, ...
      shape: on disk.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Weights:
    """All tensors of a folder, and what is wrong with it as far as files tell.

    Attributes:
      tensors: by name, in the order of files.
      metadata: of each file, as its header holds it.
      index: content of the index; None if there is a single file.
      unread: names that the index puts into files that could not be read.
      problems: one line a fault.
    """

    tensors: dict[str, Stored] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    index: dict[str, Any] | None = None
    unread: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def has_weights(folder: str | Path) -> bool:
    """Whether a folder holds weights in any form, readable or not; if not, a model is fresh."""
    patterns = ("*.safetensors", "*.safetensors.index.json", *PICKLES)
    return any(True for pattern in patterns for _ in Path(folder).glob(pattern))


def unread_weights(folder: str | Path) -> list[str]:
    """Files of a folder, or one folder below it, that look like weights but are not loaded."""
    folder = Path(folder)
    read = read_weights(folder).metadata if has_weights(folder) else {}
    return sorted(
        name
        for path in (*folder.glob("*"), *folder.glob("*/*"))
        if path.suffix.lower() in WEIGHT_ENDINGS and path.is_file()
        if (name := path.relative_to(folder).as_posix()) not in read
    )


def read_weights(folder: Path) -> Weights:
    """Read the headers of all weight files of a folder.

    Args:
      folder: of ``model.safetensors``, or of an index and the files that it names.
    Returns: what was found, faults included; the caller adds its own and raises them all.
    """
    single, index = folder / SINGLE, folder / INDEX
    weights = Weights()
    if index.exists():
        _read_index(folder, weights)
        if single.exists() and SINGLE not in weights.metadata:
            weights.problems.append(f"{SINGLE} stands beside {INDEX}, which does not name it")
    elif single.exists():
        _read_file(folder, SINGLE, None, weights)
    else:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        weights.problems += [f"{name} is pickled, which is never read" for name in pickles]
        weights.problems += [f"{name} is named by no {INDEX}" for name in others]
        weights.problems.append(f"there is neither {SINGLE} nor {INDEX}")
    return weights


def _read_index(folder: Path, weights: Weights) -> None:
    """Read the index, then the header of each file that it names."""
    try:
        index = read_json(folder / INDEX)
        places = index["weight_map"]
        named = all(isinstance(name, str) and isinstance(at, str) for name, at in places.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        weights.problems.append(f"{INDEX} cannot be read: {error}")
        return
    if not named:
        weights.problems.append(f"{INDEX} does not map names of tensors to names of files")
        return
    weights.index = index
    files: dict[str, set[str]] = {}
    for name, file in places.items():
        files.setdefault(file, set()).add(name)
    for file, names in sorted(files.items()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            weights.problems.append(f"{INDEX} names {file!r}, no safetensors file of the folder")
            weights.unread |= names
        else:
            _read_file(folder, file, names, weights)


def _read_file(folder: Path, file: str, names: set[str] | None, weights: Weights) -> None:
    """Read one header; with an index, its names must be those that the index puts there."""
    try:
        odd = odd_file(folder / file)
        if odd is not None:
            raise OddFileError(odd)
        with safe_open(folder / file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            found = {
                name: Stored(file, part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
            weights.metadata[file] = opened.metadata() or {}
        _check_unique(folder / file)
    except FileNotFoundError:
        weights.problems.append(f"{file} is missing")
    except (OSError, ValueError, SafetensorError) as error:
        weights.problems.append(f"{file} cannot be read: {error}")
    else:
        listed = set(found) if names is None else names
        for name in sorted(set(found) - listed):
            weights.problems.append(f"{name} is in {file}, where {INDEX} does not put it")
        for name in sorted(listed - set(found)):
            weights.problems.append(f"{name} is not in {file}, where {INDEX} puts it")
            weights.unread.add(name)
        weights.tensors |= {name: found[name] for name in found if name in listed}
        return
    weights.unread |= names or set()


def _check_unique(path: Path) -> None:
    """Refuse a header in which a name occurs twice; the reader would silently take the last."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        parse_json(file.read(size).decode("utf-8"))
