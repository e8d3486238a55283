"""Where an export goes: whatever happens on the way, the old one or the new one is there."""

import errno
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import place
from model.checkpoint.headers import CheckpointError, unread_weights
from model.checkpoint.place import check_target, make_sibling, put_in_place, restore, try_target
from model.checkpoint.save_load import save_checkpoint
from tests.tables import CONFIG

NORM = "model.language_model.norm.weight"


def tensors(value):
    shapes = CONFIG.parameter_shapes().items()
    return {name: torch.full(shape, value) for name, shape in shapes}.items()


def norm_of(folder):
    return float(load_file(folder / "model.safetensors")[NORM][0])


def dead():
    """Number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def killed_at(folder, moment):
    """Export over a folder in a process that is killed before the given call of the export."""
    child = os.fork()
    if child == 0:
        module, name = moment.rsplit(".", 1)
        target = {"os": os, "shutil": place.shutil}[module]
        setattr(target, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            save_checkpoint(tensors(2.0), folder, CONFIG)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == signal.SIGKILL


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("moment", ["os.replace", "shutil.rmtree"])
def test_a_kill_leaves_the_old_export_or_the_new_one(tmp_path, monkeypatch, moment, exchanges):
    if not exchanges:
        monkeypatch.setattr(place, "_exchange", lambda *_: False)
    folder = tmp_path / "export"
    save_checkpoint(tensors(1.0), folder, CONFIG)
    if exchanges and moment == "os.replace":
        moment = "shutil.rmtree"  # nothing is renamed where two folders are exchanged
    killed_at(folder, moment)
    assert len(list(tmp_path.iterdir())) == 2
    assert norm_of(folder) == (1.0 if moment == "os.replace" else 2.0)
    assert not restore(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_kill_between_two_renames_is_put_right(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "_exchange", lambda *_: False)
    folder, rename, done = tmp_path / "export", os.replace, []
    save_checkpoint(tensors(1.0), folder, CONFIG)

    def once(*paths):
        if done:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(rename(*paths))

    child = os.fork()
    if child == 0:
        os.replace = once
        try:
            save_checkpoint(tensors(2.0), folder, CONFIG)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert not folder.exists()
    assert restore(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert norm_of(folder) == 1.0


def test_leftovers_go_and_what_is_in_use_stays(tmp_path):
    here, export = socket.gethostname(), tmp_path / "export"
    gone = [f".export.part-{dead()}-{here}", f".export.part-{os.getpid()}-{here}"]
    kept = [
        f".export.part-{os.getppid()}-{here}",
        f".export.part-{dead()}-another",
        ".export.part-x",
        f".other.part-{dead()}-{here}",
    ]
    for name in (*gone, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    (tmp_path / f".export.part-{dead()}-{here}.txt").write_text("a file")
    save_checkpoint(tensors(1.0), export, CONFIG)
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert names == {"export", *kept}
    os.utime(tmp_path / kept[1], (0, 0))  # of another machine, but a day old
    restore(export)
    assert not (tmp_path / kept[1]).exists()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_have_the_modes_that_the_umask_leaves(tmp_path, mask):
    before = os.umask(mask)
    try:
        save_checkpoint(tensors(1.0), tmp_path / "export", CONFIG, shard_bytes=200_000)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "export").iterdir()}
    assert modes == {0o666 & ~mask}
    assert stat.S_IMODE((tmp_path / "export").stat().st_mode) == 0o777 & ~mask


def test_values_that_are_not_finite_on_disk_are_not_exported(tmp_path):
    folder = tmp_path / "export"
    save_checkpoint(tensors(1.0), folder, CONFIG)
    with pytest.raises(CheckpointError, match="has values that are not finite as float32: nothing"):
        save_checkpoint(tensors(float("nan")), folder, CONFIG)
    with pytest.raises(CheckpointError, match="has values that are not finite as float16: nothing"):
        save_checkpoint(tensors(7e4), folder, CONFIG, dtype=torch.float16)
    assert norm_of(folder) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.fixture
def small_files():
    """No file may have more than 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_of_file_sizes_is_found_before_and_named_after(tmp_path, small_files):
    folder = tmp_path / "export"
    with pytest.raises(CheckpointError) as error:
        try_target(folder, CONFIG)
    assert str(error.value).startswith(f"{folder}: an export has a file of ")
    assert str(error.value).endswith(", and no file may have more than 65,536 (ulimit -f)")
    with pytest.raises(CheckpointError, match=f"{folder} cannot be written: .*File too large"):
        save_checkpoint(tensors(1.0), folder, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_room_is_looked_for_at_the_start(tmp_path, monkeypatch):
    usage = place.shutil.disk_usage(tmp_path)
    free = 4 * sum(x.numel() for _, x in tensors(0.0))
    monkeypatch.setattr(place.shutil, "disk_usage", lambda _: usage._replace(free=free))
    with pytest.raises(CheckpointError, match=rf"beside what stands there, and {free:,} are free"):
        try_target(tmp_path / "export", CONFIG)
    enough = usage._replace(free=int(1.05 * free))
    monkeypatch.setattr(place.shutil, "disk_usage", lambda _: enough)
    try_target(tmp_path / "export", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_cannot_get_its_name_is_kept_beside(tmp_path, monkeypatch):
    folder, rename = tmp_path / "export", os.replace

    def refuse(source, target):
        if Path(target) == folder:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(source, target)

    monkeypatch.setattr(place.os, "replace", refuse)
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(tensors(1.0), folder, CONFIG)
    kept = f"the export is whole, as {folder}.new"
    assert str(error.value) == f"{folder} cannot be replaced: Device or resource busy; {kept}"
    assert norm_of(tmp_path / "export.new") == 1.0


def test_a_mount_point_is_found_at_the_start():
    with pytest.raises(CheckpointError, match="/proc is a mount point, which keeps its name"):
        try_target("/proc", CONFIG)


@pytest.mark.parametrize("folder", ["/proc/export", "/dev/null/export"])
def test_a_place_that_takes_no_files_is_refused(folder):
    with pytest.raises(CheckpointError, match=f"{folder} cannot be written: "):
        try_target(folder, CONFIG)


def test_a_checkpoint_of_others_is_not_replaced(tmp_path):
    save_checkpoint(tensors(1.0), tmp_path / "theirs", CONFIG)
    save_checkpoint(tensors(1.0), tmp_path / "ours", CONFIG, extra={"training.json": "{}"})
    (tmp_path / "empty").mkdir()
    for name in ("ours", "empty", "new"):
        check_target(tmp_path / name, foreign=False)
    check_target(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"theirs holds a checkpoint without training\.json"):
        check_target(tmp_path / "theirs", foreign=False)


@pytest.mark.parametrize("exchanges", [True, False])
def test_folders_take_each_others_place(tmp_path, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr(place.ctypes, "CDLL", lambda *_, **__: object())
    final = tmp_path / "export"
    final.mkdir()
    (final / "old").write_text("old")
    work = make_sibling(final)
    (work / "new").write_text("new")
    put_in_place(work, final)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert [path.name for path in final.iterdir()] == ["new"]


def test_files_that_look_like_weights_are_named(tmp_path):
    names = "model.pt model.pkl adapter_model.bin consolidated.PTH weights.gguf x.npz a.h5".split()
    for name in (*names, "config.json", "tokenizer.model", "README.md", "merges.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "folder.pt" / "model.safetensors").write_bytes(b"x")
    assert unread_weights(tmp_path) == sorted([*names, "folder.pt/model.safetensors"])
    Path(tmp_path / "consolidated.PTH").unlink()
    save_checkpoint(tensors(1.0), tmp_path / "whole", CONFIG, shard_bytes=200_000)
    assert unread_weights(tmp_path / "whole") == []
    (tmp_path / "whole" / "adapter_model.safetensors").write_bytes(b"x")
    assert unread_weights(tmp_path / "whole") == ["adapter_model.safetensors"]
