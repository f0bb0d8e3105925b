"""What a checkpoint holds, which one counts, and how many are kept."""

import errno
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpointing import FILES, FINGERPRINT, SHAPE, bits, failing, names, newest, same, save, saver, snapshot, step
from pipeline import flip_bit

from eagle31_train import export
from eagle31_train.measure.drafters import read_shape
from eagle31_train.schema import UserError
from eagle31_train.store.sealed import checksum, seal, unseal
from train import checkpoint


@pytest.fixture(autouse=True)
def no_power_is_lost(monkeypatch):
    """So that files need not reach the disk, which takes its time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)


# ---------------------------------------------------------------- what it holds


def test_a_snapshot_comes_back_bit_for_bit(tmp_path):
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    meant = replace(
        snapshot(100),
        weights={"b": odd, "a": torch.randn(3, 5).T, "one": torch.tensor(1.5), "none": torch.empty(0, 4)},
        moments={"exp_avg.b": odd.double(), "exp_avg_sq.b": odd.bfloat16()},
    )
    save(tmp_path, meant)
    assert same(newest(tmp_path), meant)
    assert not same(newest(tmp_path), snapshot(100))


def test_the_manifest_is_sealed_and_lists_every_other_file(tmp_path):
    save(tmp_path, snapshot(100))
    path = step(tmp_path, 100)
    assert names(path) == FILES
    manifest = unseal((path / "manifest.json").read_bytes())
    assert manifest["files"] == {
        name: {"bytes": (path / name).stat().st_size, "checksum": checksum(path / name)}
        for name in FILES
        if name != "manifest.json"
    }


def test_the_export_stage_reads_it(tmp_path):
    save(tmp_path, snapshot(100))
    assert read_shape(step(tmp_path, 100) / "drafter.json") == SHAPE
    found = export.read_tensors(step(tmp_path, 100) / "model.safetensors")
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in snapshot(100).weights.items()
    }


def test_a_drafter_of_another_shape_is_refused_with_the_difference(tmp_path):
    save(tmp_path, snapshot(100))
    with pytest.raises(UserError) as error:
        checkpoint.load(step(tmp_path, 100), replace(SHAPE, intermediate_size=8, rope_scaling=None))
    assert str(error.value) == (
        f"{step(tmp_path, 100)} is a drafter of another shape: intermediate_size: 6 there, 8 here; "
        "rope_scaling: {'rope_type': 'linear', 'factor': 2.0} there, None here"
    )


def test_extra_comes_back_as_json_has_it(tmp_path):
    save(tmp_path, replace(snapshot(1), extra={"pair": (1, 2), "depths": {9: 0.2, 10: 0.1}, "nothing": None}))
    assert newest(tmp_path).extra == {"pair": [1, 2], "depths": {"9": 0.2, "10": 0.1}, "nothing": None}


# ---------------------------------------------------------------- which one counts


def test_the_newest_of_a_run_is_found_by_number(tmp_path):
    assert checkpoint.newest(tmp_path / "absent", FINGERPRINT, print) is None
    save(tmp_path, *(snapshot(number) for number in (9, 999_999, 1_000_000)), keep=3)
    for stray in ("step-", "step-9.bak", "step-000008 (copy)", "step-x", "notes"):
        (tmp_path / stray).mkdir()
    assert same(newest(tmp_path), snapshot(1_000_000))
    assert [path.name for path in checkpoint.in_order(tmp_path)] == ["step-000009", "step-999999", "step-1000000"]


def harms():
    """Every way to spoil a checkpoint, as (label, function of its folder, the file named, the cause)."""
    chosen = random.Random(0)

    def cut(name, share):
        def harm(path):
            data = (path / name).read_bytes()
            (path / name).write_bytes(data[: int(share * len(data))])

        return harm

    def flip(name, share, bit):
        def harm(path):
            data = bytearray((path / name).read_bytes())
            data[int(share * len(data))] ^= 1 << bit
            (path / name).write_bytes(data)

        return harm

    for name in FILES:
        size, value = "bytes, not", "does not match its checksum"
        if name == "manifest.json":
            size = value = "is damaged"
        for share in (0, 0.999999, chosen.random()):
            yield f"cut {name} {share}", cut(name, share), name, size
        for _ in range(8):
            share, bit = chosen.choice([0, 0.02, 0.999999, chosen.random()]), chosen.randrange(8)
            yield f"flip {name} {share} {bit}", flip(name, share, bit), name, value
        yield f"grow {name}", lambda path, n=name: (path / n).open("ab").write(b" "), name, size
        yield f"lose {name}", lambda path, n=name: (path / n).unlink(), name, "is missing"
        yield f"folder {name}", lambda path, n=name: ((path / n).unlink(), (path / n).mkdir()), name, ""
    yield "stray", lambda path: (path / "model-copy.safetensors").touch(), "model-copy.safetensors", "does not belong"
    yield "gone", shutil.rmtree, "", ""
    yield "a file", lambda path: (shutil.rmtree(path), path.touch()), "manifest.json", "is missing"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return save(tmp_path_factory.mktemp("two"), snapshot(1), snapshot(2))


@pytest.mark.parametrize(("harm", "file", "cause"), [pytest.param(*rest, id=label) for label, *rest in harms()])
def test_a_spoilt_checkpoint_is_named_and_the_one_before_is_used(two, tmp_path, harm, file, cause):
    folder, said = shutil.copytree(two, tmp_path / "copy"), []
    harm(step(folder, 2))
    assert same(newest(folder, said), snapshot(1))
    if not step(folder, 2).exists():
        assert said == []
        return
    (line,) = said
    assert line.startswith(f"checkpoint {step(folder, 2)} is not used: {step(folder, 2) / file} ")
    assert cause in line
    assert "\n" not in line


def test_any_bit_of_any_file_counts(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "copy")
    chosen = random.Random(1)
    for name in FILES:
        file = step(folder, 2) / name
        whole = file.read_bytes()
        for place in chosen.sample(range(len(whole)), 60):
            spoilt = bytearray(whole)
            spoilt[place] ^= 1 << chosen.randrange(8)
            file.write_bytes(spoilt)
            assert checkpoint.damage(step(folder, 2), "step-000002", FINGERPRINT) is not None, (name, place)
        file.write_bytes(whole)
    assert checkpoint.damage(step(folder, 2), "step-000002", FINGERPRINT) is None


def test_a_checkpoint_of_another_run_or_step_is_passed_over(two, tmp_path):
    folder, said = shutil.copytree(two, tmp_path / "copy"), []
    shutil.copytree(step(folder, 1), step(folder, 3))
    shutil.copytree(step(folder, 1), step(folder, 4))
    manifest = unseal((step(folder, 4) / "manifest.json").read_bytes())
    (step(folder, 4) / "manifest.json").write_bytes(seal({**manifest, "fingerprint": "e" * 16}))
    assert same(newest(folder, said), snapshot(2))
    assert said == [
        f"checkpoint {step(folder, 4)} is not used: it is of a run of other inputs",
        f"checkpoint {step(folder, 3)} is not used: {step(folder, 3)}/manifest.json is of step 1",
    ]


def test_no_checkpoint_of_an_earlier_layout_is_taken_for_one(two, tmp_path):
    folder, said = shutil.copytree(two, tmp_path / "copy"), []
    (step(folder, 2) / "manifest.json").write_text(json.dumps({"fingerprint": FINGERPRINT, "step": 2, "files": {}}))
    assert same(newest(folder, said), snapshot(1))
    assert "it carries no checksum of itself" in said[0]


# ---------------------------------------------------------------- how many are kept


def test_the_newest_are_kept_and_leftovers_go(tmp_path):
    for leftover in (".step-000007.tmp", ".step-000001.tmp", ".step-000001.old", "step-000001"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model.safetensors").write_text("half")
    save(tmp_path, *(snapshot(number) for number in range(2, 7)), keep=3)
    assert names(tmp_path) == ["step-000004", "step-000005", "step-000006"]


@pytest.mark.parametrize("spoilt", [3, 2])
def test_a_damaged_checkpoint_does_not_count_among_the_kept(tmp_path, spoilt):
    ours = saver(tmp_path, keep=3)
    for number in (1, 2, 3):
        ours.save(snapshot(number))
    ours.wait()
    (step(tmp_path, spoilt) / "model.safetensors").write_bytes(b"")
    ours.save(snapshot(4))
    ours.close()
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003", "step-000004"], "three of them are whole"
    ours = saver(tmp_path, keep=2)
    ours.save(snapshot(5))
    ours.close()
    assert names(tmp_path) == ["step-000004", "step-000005"]


def test_checkpoints_of_another_run_neither_count_nor_go(tmp_path):
    other = checkpoint.Saver(tmp_path, "e" * 16, 2, print)
    other.save(snapshot(8))
    other.close()
    save(tmp_path, *(snapshot(number) for number in (1, 2, 3)))
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000008"]


def test_only_changed_files_are_read_again_to_see_which_count(tmp_path, monkeypatch):
    read = []

    def counted(path):
        read.append(path.parent.name)
        return checksum(path)

    save(tmp_path, snapshot(1), snapshot(2), snapshot(3), keep=3)
    monkeypatch.setattr(checkpoint, "checksum", counted)
    found = checkpoint.newest(tmp_path, FINGERPRINT, print)
    assert set(read) == {"step-000003"}
    read.clear()
    ours = saver(tmp_path, keep=3, committed=found)
    ours.save(snapshot(4))
    ours.wait()
    assert set(read) == {"step-000002"}, "the one just found and the one just written are known, and the first one goes"
    read.clear()
    ours.save(snapshot(5))
    ours.wait()
    assert read == []
    flip_bit(step(tmp_path, 4) / "rng.safetensors")
    os.utime(step(tmp_path, 4) / "rng.safetensors", ns=(1, 1))  # a coarse clock may not have moved since
    ours.save(snapshot(6))
    ours.save(snapshot(7))
    ours.close()
    assert set(read) == {"step-000004"}
    assert names(tmp_path) == ["step-000005", "step-000006", "step-000007"]


def test_a_checkpoint_that_was_set_aside_comes_back(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "copy")
    step(folder, 2).rename(folder / ".step-000002.old")
    assert same(newest(folder), snapshot(2))
    assert names(folder) == ["step-000001", "step-000002"]


def test_one_that_was_set_aside_for_a_damaged_one_comes_back(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "copy")
    shutil.copytree(step(folder, 2), folder / ".step-000002.old")
    flip_bit(step(folder, 2) / "model.safetensors")
    assert same(newest(folder), snapshot(2))
    assert names(folder) == ["step-000001", "step-000002"]


def test_one_that_was_set_aside_counts_among_the_kept(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "copy")
    step(folder, 2).rename(folder / ".step-000002.old")
    save(folder, snapshot(3))
    assert names(folder) == ["step-000002", "step-000003"]


def test_half_of_a_removed_one_does_not_come_back(two, tmp_path):
    folder, said = shutil.copytree(two, tmp_path / "copy"), []
    step(folder, 2).rename(folder / ".step-000002.old")
    (folder / ".step-000002.old" / "rng.safetensors").unlink()
    assert same(newest(folder, said), snapshot(1))
    assert said == [f"checkpoint {step(folder, 2)} is not used: {step(folder, 2)}/manifest.json is missing"]
    save(folder, snapshot(3))
    assert names(folder) == ["step-000001", "step-000003"]


def test_one_that_cannot_be_put_back_is_not_thrown_away(two, tmp_path, monkeypatch):
    folder = shutil.copytree(two, tmp_path / "copy")
    step(folder, 2).rename(folder / ".step-000002.old")
    monkeypatch.setattr(Path, "replace", failing(errno.EROFS))
    with pytest.raises(UserError) as error:
        newest(folder)
    assert str(error.value) == (
        f"{folder}/.step-000002.old could not be put back as step-000002 (Read-only file system): mend that, then "
        "run the same command again"
    )
