"""A store in a bucket: extracted into it, trained from it through a small cache, followed in it."""

import shutil

import pytest
from made import message_of
from pipeline import assert_equal, contents

from eagle31_train.extract import extract
from eagle31_train.store import Store
from train import windows

URL = "s3://bucket/runs/tiny/store"
MORE = ("train.window_tokens=20", "store.last_codec=int8_channel")


@pytest.fixture
def made(new_run):
    """A run without a store."""
    run = new_run()
    shutil.rmtree(run.folder / "run" / "store")
    return run


def test_a_bucket_is_extracted_into_and_trained_from_as_a_folder_is(new_run, made, s3, monkeypatch):
    local = new_run()
    extract(local.config(*MORE, "overwrite=true"))
    local.fit(*MORE)
    store = local.folder / "run" / "store"
    plan = Store(store).plan
    cut = windows.cut(Store(store).split("train"), 20)
    kept = sum(shard.bytes for shard in plan.of("heldout"))
    most = kept + 2 * max(sum(shard.bytes for shard in window) for window in cut)  # and not the whole store
    assert most < sum(shard.bytes for shard in plan.shards)
    options = [*MORE, f"store_dir={URL}"]
    config = made.config(*options, f"store.cache_bytes={most}")
    extract(config)
    made.fit(*options, f"store.cache_bytes={most}")
    there = {name.split("/store/")[1] for name in s3.find("bucket")}
    assert there == contents(store).keys()
    for name in there - {"manifest.json"}:
        assert s3.cat_file(f"bucket/runs/tiny/store/{name}") == (store / name).read_bytes(), name
    assert_equal(made.weights(), local.weights())
    cached = [path for path in config.cache_folder.rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in cached) <= most
    message = message_of(made.fit, *options, "store.cache_bytes=9000", "name=small")
    assert message.startswith("store.cache_bytes=9,000 cannot hold two windows of ")
    assert "lower train.window_tokens" in message
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    message = message_of(made.fit, *options)
    assert message.startswith("several machines train, ")
    assert "set store.cache_dir=…" in message


@pytest.mark.usefixtures("s3")
def test_a_followed_bucket_is_emptied_of_what_was_trained(made):
    options = [*MORE, f"store_dir={URL}", "train.epochs=1", "store.max_bytes=1MB", "store.follow=true"]
    extract(made.config(*options))
    storage = made.unfinish(*options)
    store = Store(storage, follow=True)
    made.fit(*options)
    left = storage.sizes("shards").keys()
    assert left == {shard.name for shard in store.plan.of("heldout")}
