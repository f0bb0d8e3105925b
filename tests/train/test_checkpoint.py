"""What a checkpoint holds, which one counts, which are kept, and what a failing disk does."""

import errno
import os
import shutil
from dataclasses import replace

import pytest
import torch
from checkpointing import FILES, FINGERPRINT, failing, names, newest, same, save, saver, snapshot, step
from pipeline import contents, flip_bit

from eagle31_train import artifacts
from eagle31_train.artifacts import checksum
from eagle31_train.errors import UserError
from eagle31_train.store import tensors as store_tensors
from eagle31_train.store.sealed import unseal
from train import checkpoint

pytestmark = pytest.mark.usefixtures("no_power_is_lost")


# ---------------------------------------------------------------- what it holds


@pytest.mark.core
def test_a_snapshot_comes_back_bit_for_bit(tmp_path):
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    meant = replace(
        snapshot(100),
        weights={"b": odd, "a": torch.randn(3, 5).T, "one": torch.tensor(1.5), "none": torch.empty(0, 4)},
        moments={"exp_avg.b": odd.double(), "exp_avg_sq.b": odd.bfloat16()},
    )
    path = step(save(tmp_path, meant), 100)
    assert same(newest(tmp_path), meant)
    assert not same(newest(tmp_path), snapshot(100))
    assert names(path) == FILES
    assert unseal((path / "manifest.json").read_bytes())["files"] == {
        name: {"bytes": (path / name).stat().st_size, "checksum": checksum(path / name)}
        for name in FILES
        if name != "manifest.json"
    }


# ---------------------------------------------------------------- which one counts


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return save(tmp_path_factory.mktemp("two"), snapshot(1), snapshot(2))


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def remove(file):
    file.unlink()


def test_a_checkpoint_that_cannot_be_read_is_passed_over_too(tmp_path, monkeypatch):
    save(tmp_path, snapshot(1), snapshot(2))
    right, fail, said = artifacts.checksum, failing(errno.EIO), []
    monkeypatch.setattr(artifacts, "checksum", lambda file: (fail if "000002" in str(file) else right)(file))
    assert same(newest(tmp_path, said), snapshot(1))
    assert ".safetensors cannot be read ([Errno 5] Input/output error)" in said[0]


@pytest.mark.parametrize("harm", [flip_bit, cut, remove])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(two, tmp_path, harm, name):
    folder, said = shutil.copytree(two, tmp_path / "copy"), []
    file = step(folder, 2) / name
    harm(file)
    assert same(newest(folder, said), snapshot(1))
    (line,) = said
    assert line.startswith(f"checkpoint {step(folder, 2)} is not used: {file} ")


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_that_a_disk_reads_wrongly_once_is_used(two, tmp_path, monkeypatch, name):
    """Until the kernel is told to forget its copy, a file has a wrong bit."""
    copy = shutil.copytree(two, tmp_path / "copy")
    flip_bit(step(copy, 2) / name)
    monkeypatch.setattr(artifacts, "forget_pages", lambda file: shutil.copy(two / file.relative_to(copy), file))
    assert same(newest(copy), snapshot(2))


def test_a_checkpoint_of_another_run_is_passed_over(two):
    assert "it is of a run of other inputs" in checkpoint.damage(step(two, 2), "e" * 16)


# ---------------------------------------------------------------- how many are kept


def test_a_damaged_checkpoint_does_not_count_among_the_kept(tmp_path):
    """Passed over as a run goes on, it must not take the place of the one that the run goes on from."""
    save(tmp_path, snapshot(2), snapshot(6))
    flip_bit(step(tmp_path, 6) / "model.safetensors")
    ours = saver(tmp_path, 2, committed=checkpoint.newest(tmp_path, FINGERPRINT, lambda _: None))
    ours.save(snapshot(4))
    ours.wait()
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000006"]
    ours.save(snapshot(6))
    ours.save(snapshot(8))
    ours.close()
    assert names(tmp_path) == ["step-000006", "step-000008"]
    assert same(newest(tmp_path), snapshot(8))


# ---------------------------------------------------------------- a disk that fails


def test_an_error_of_the_disk_is_said_in_one_line_and_the_next_save_tries_again(tmp_path, monkeypatch):
    save(tmp_path, snapshot(1))
    before, said = contents(tmp_path), []
    ours = saver(tmp_path, say=said.append, committed=step(tmp_path, 1))
    with monkeypatch.context() as broken:
        broken.setattr(store_tensors, "_write_all", failing(errno.ENOSPC))
        ours.save(snapshot(2))
        ours.wait()
        with pytest.raises(UserError, match=r"could not be written .* goes on from .*step-000001"):
            ours.save(snapshot(2), required=True)
    assert len(said) == 2
    assert f"could not be written ({os.strerror(errno.ENOSPC)})" in said[0]
    assert said[0].endswith(f"would go back to {step(tmp_path, 1)}")
    assert contents(tmp_path) == before
    ours.save(snapshot(3), required=True)
    ours.close()
    assert ours.committed == step(tmp_path, 3)
