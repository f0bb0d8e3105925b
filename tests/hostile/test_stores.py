"""A store of somebody else's whose checksums are right, and whose content is not."""

import json
import shutil
from collections import Counter

import pytest
import torch
from hypothesis import strategies as st
from made import VOCAB, Made, problems
from mutating import ENDLESS, UNREADABLE, cases, documents, outcome, parts, spoil, torn, with_header
from pipeline import reseal

from eagle31_train.common import order
from eagle31_train.common.artifacts import MANIFEST
from eagle31_train.common.errors import UserError
from eagle31_train.store import Store, stream
from eagle31_train.store.__main__ import _describe, check
from eagle31_train.store.backends import LocalStorage, open_storage
from eagle31_train.store.format import CONSUMED, PLAN, PROVENANCE, SHARDS, STREAM, TARGET, TARGET_LINE
from eagle31_train.store.sealed import digest, seal, unseal
from eagle31_train.store.tensors import save_file
from train.windows import Usage, cut

pytestmark = pytest.mark.usefixtures("no_power_is_lost")
MADE = Made({"train": [9, 4, 6], "heldout": [5, 3]}, 16, "fp8", "bf16")
SMALL = [MANIFEST, PLAN, PROVENANCE, SHARDS, TARGET_LINE, CONSUMED, STREAM]
LINES = [shard.line for shard in MADE.plan.shards]
BIG = [TARGET, *(shard.name for shard in MADE.plan.shards)]
OURS = {"store": MADE.fingerprint, "by": "t" * 16, "shards": [], "finished": False}
NAMES = ["store", "bytes", "files", "lengths", "fidelity", "norm", PLAN, "x"]
VALUES = ["fp8", "int4", "../../x", "/etc/passwd", "train", "heldout", MADE.fingerprint, BIG[1], BIG[2], -5, 2**40]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A complete store, and one that was begun."""
    whole, begun = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("begun")
    MADE.write(whole)
    MADE.write(begun, stop_after=2)
    for folder in (whole, begun):
        (folder / CONSUMED).write_bytes(seal(OURS, indent=2))
    return {False: whole, True: begun}


def read(folder, **options):
    """All that training reads; how many samples."""
    store, samples = Store(folder, **options), 0
    assert store.target
    assert store.max_bytes is None or store.max_bytes >= 0
    for name in ("heldout", "train"):
        split = store.split(name)
        for index in range(len(split)):
            document = split.read(index)
            document.aux.decode(), document.last.decode()
            samples += 1
    return samples


def change_header(folder, name, change):
    """Change the header of a safetensors file of a store, and make its checksums right again."""
    header, tensors = parts((folder / name).read_bytes())
    (folder / name).write_bytes(with_header(change(header), tensors))
    reseal(folder)


def harm(folder, name, data):
    """Change a file of a store, and make its checksums right again."""
    path = folder / name
    if not path.exists():
        return
    before = path.read_bytes()
    if name in BIG:
        values = ["I64", "F32", "BF16", "U8", [0, 8]]
        change_header(folder, name, lambda header: data.draw(documents([header], NAMES, values)))
    elif data.draw(st.integers(0, 3)) == 0:
        path.write_bytes(data.draw(torn(before)))
    else:
        indent = None if name in (SHARDS, PLAN, STREAM, TARGET_LINE, *LINES) else 2
        values = [unseal(line) for line in ([before] if indent else before.splitlines(keepends=True))]
        at = data.draw(st.integers(0, len(values) - 1))
        values[at] = data.draw(documents([values[at]], NAMES, VALUES))
        try:
            path.write_bytes(b"".join(seal(value, indent) for value in values))
        except (TypeError, UnicodeEncodeError):  # no object, or no text: nobody can have sealed that
            path.write_text(json.dumps(values[at]))


@cases(st.data(), quick=60, thorough=4_000)
def test_stores(data, stores, tmp_path, monkeypatch):
    begun = data.draw(st.booleans())
    name = data.draw(st.sampled_from(data.draw(st.sampled_from([SMALL, SMALL, BIG, LINES if begun else SMALL]))))
    monkeypatch.setattr(stream, "POLL", 0)
    folder, outside = tmp_path / "store", tmp_path / "x"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(stores[begun], folder)
    outside.write_bytes(b"somebody else's")
    harm(folder, name, data)
    storage = LocalStorage(str(folder), folder)
    outcome(lambda: read(folder, follow=begun, patience=-1))
    outcome(lambda: list(check(storage, Counter())))
    outcome(lambda: _describe(storage))
    if begun:
        outcome(lambda: MADE.write(folder, patience=-1))
    assert outside.read_bytes() == b"somebody else's"


@pytest.mark.parametrize("name", BIG[:2])
def test_a_tensor_of_impossibly_many_rows_is_damage(name, stores, tmp_path):
    shutil.copytree(stores[False], tmp_path / "store")
    change_header(tmp_path / "store", name, lambda header: header | {"x": ENDLESS})
    assert "cannot be read" in str(outcome(lambda: read(tmp_path / "store")))


def test_a_size_beyond_all_real_ones_is_damage(stores, tmp_path):
    shutil.copytree(stores[False], folder := tmp_path / "store")
    lines = [unseal(line) for line in (folder / SHARDS).read_bytes().splitlines(keepends=True)]
    (folder / SHARDS).write_bytes(b"".join(seal({**line, "size": 10**400}) for line in lines))
    assert "see `eagle31 store verify the store`" in outcome(lambda: _describe(LocalStorage("the store", folder)))


@pytest.mark.parametrize("name", [MANIFEST, PLAN, TARGET_LINE, BIG[1]])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_links_to_nowhere_and_to_what_never_ends(name, kind, stores, tmp_path):
    shutil.copytree(stores[False], tmp_path / "store")
    spoil(tmp_path / "store" / name, kind)
    assert isinstance(outcome(lambda: read(tmp_path / "store")), UserError)


@pytest.mark.parametrize(
    ("name", "weight", "said"),
    [
        ("embed_tokens", None, "lacks the weight embed_tokens"),
        ("embed_tokens", torch.tensor(1.0), "cannot be read"),
        ("norm", None, "lacks the weight norm"),
        ("norm", torch.ones(15), "holds norm [15]"),
        ("lm_head", None, None),  # the embedding stands for it
        ("lm_head", torch.tensor(1.0), "cannot be read"),
        ("lm_head", torch.ones(VOCAB - 1, 16), f"holds lm_head [{VOCAB - 1}, 16]"),
    ],
)
def test_target_weights_that_training_refuses_are_damage_to_verify_too(name, weight, said, stores, tmp_path):
    shutil.copytree(stores[False], folder := tmp_path / "store")
    weights = MADE.weights | {name: weight}
    save_file({name: weight for name, weight in weights.items() if weight is not None}, folder / TARGET)
    reseal(folder)
    found, target = problems(folder), outcome(lambda: Store(folder).target)
    if said:
        assert [text.startswith(f"the store/{TARGET} {said}") for text in found] == [True], found
        assert said in str(target)
    else:
        assert found == []
        assert torch.equal(target["lm_head"], MADE.weights["embed_tokens"])


@cases(st.data(), quick=40, thorough=4_000)
def test_a_training_that_follows_believes_only_what_a_training_can_have_used_up(data, stores, tmp_path, monkeypatch):
    """It goes on, with the extraction beside it, or says what is wrong; nothing but training shards is removed."""
    monkeypatch.setattr(stream, "POLL", 0)
    folder, outside = tmp_path / "store", tmp_path / "x"
    shutil.rmtree(folder, ignore_errors=True)
    MADE.write(folder, stop_after=data.draw(st.integers(0, 3)), max_bytes=1 << 20)
    outside.write_bytes(b"somebody else's")
    names = [*(shard.name for shard in MADE.plan.shards), *LINES, "../x", "shards/../../x"]
    used = OURS | {"shards": data.draw(st.lists(st.sampled_from(names))), "finished": data.draw(st.booleans())}
    used["by"] = data.draw(st.sampled_from(["t" * 16, "", "u" * 16]))
    (folder / CONSUMED).write_bytes(seal(used, indent=2))
    if data.draw(st.booleans()):
        harm(folder, CONSUMED, data)
    before = set(folder.rglob("*"))

    def follow():
        store = Store(folder, follow=True, patience=-1)
        split = store.split("train")
        steps = order.schedule(split.lengths, 20, 0, 1, None)
        usage = Usage(store, split, steps, cut(split, None), "t" * 16)
        usage.begin(0, remove=True)
        usage.release(len(steps), remove=True)

    outcome(follow)
    outcome(lambda: MADE.write(folder, patience=-1, max_bytes=1 << 20))
    gone = {str(path.relative_to(folder)) for path in before - set(folder.rglob("*"))} - {STREAM, *LINES}
    assert all(name.startswith("shards/train-") for name in gone)
    assert outside.read_bytes() == b"somebody else's"


@pytest.mark.parametrize("name", [PLAN, STREAM])
def test_files_of_another_store_are_not_believed(name, tmp_path):
    """Its plan says which samples a shard holds, and its stream.json how many bytes there may be."""
    Made(MADE.lengths, 16, "fp8", "bf16", fingerprint="e" * 16).write(tmp_path / "other", stop_after=1)
    MADE.write(tmp_path / "store", stop_after=2)
    shutil.copy(tmp_path / "other" / name, tmp_path / "store" / name)
    with pytest.raises(UserError, match=rf"{name} belongs to another store, e+ \(this is f+\)"):
        Store(tmp_path / "store", follow=True)
    MADE.write(tmp_path / "store")  # the extraction makes them anew
    assert read(tmp_path / "store")
    (tmp_path / "store" / CONSUMED).write_bytes(seal({**OURS, "store": "e" * 16}, indent=2))
    (tmp_path / "store" / BIG[1]).unlink()
    assert "consumed.json belongs to another store" in str(outcome(lambda: read(tmp_path / "store")))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        # Shards that are used up, or damaged, are removed by their names.
        (lambda plan: plan["shards"][0].update(name="../x"), "name: String should match"),
        (lambda plan: plan["lengths"].update(x=5), "x: Extra inputs are not permitted"),
        (lambda plan: plan["supervised"].update(x=[1]), "x: Extra inputs are not permitted"),
        (lambda plan: plan.update(supervised=None), "Input should be a valid dictionary"),
    ],
)
def test_a_plan_with_what_no_plan_has_is_refused(change, problem, stores, tmp_path):
    shutil.copytree(stores[True], folder := tmp_path / "store")
    plan = unseal((folder / PLAN).read_bytes())
    change(plan)
    (folder / PLAN).write_bytes(seal(plan))
    found = str(outcome(lambda: read(folder, follow=True, patience=-1)))
    assert f"plan.json is damaged ({problem}" in found, found


def test_a_manifest_that_lists_files_elsewhere_writes_and_removes_nothing_there(stores, tmp_path):
    """Copies of a bucket's files go into a cache by their names, and leave it where they are not as they are listed."""
    bucket = open_storage("memory://hostile/store", tmp_path / "deep" / "cache", 10**6)
    theirs, removed, written = b"0123456789", tmp_path / "removed", tmp_path / "written"
    removed.write_bytes(b"our own 10")
    manifest = unseal((stores[False] / MANIFEST).read_bytes())
    for path, checksum in ((removed, "0" * 32), (written, digest(theirs))):
        bucket.fs.pipe_file(f"{bucket.root}/../../../{path.name}", theirs)
        manifest["files"][f"../../../{path.name}"] = {"bytes": len(theirs), "checksum": checksum}
    bucket.write(MANIFEST, seal(manifest, indent=2))
    assert "provenance.json is missing" in str(outcome(lambda: Store(bucket)))
    assert removed.read_bytes() == b"our own 10"
    assert not written.exists()
