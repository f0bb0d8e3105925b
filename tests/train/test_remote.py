"""A store in a bucket: extracted into it, trained from it through a small cache, followed in it."""

import json
import shutil
from unittest.mock import patch

import pytest
import s3fs
from flaky import FAULTS, flaky
from pipeline import assert_equal, make_run, tiny_config
from safetensors.torch import load_file

from eagle31_train.common.errors import UserError
from eagle31_train.extract import extract
from eagle31_train.store import Store, storage_of
from eagle31_train.store.backends import remote
from eagle31_train.store.sealed import seal
from train import loop, windows

URL = "s3://bucket/runs/tiny/store"
MORE = ("train.window_tokens=20", "store.last_codec=int8_channel")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """folder/target and folder/run/data; and the store of the local run, trained; not to be changed."""
    folder = tmp_path_factory.mktemp("local")
    make_run(folder)
    extract(tiny_config(folder, *MORE))
    with patch.dict("os.environ", ACCELERATE_USE_CPU="true"):
        loop.train(tiny_config(folder, *MORE))
    (folder / "run" / "train").rename(folder / "local")
    (folder / "run" / "store").rename(folder / "local-store")
    return folder


@pytest.fixture
def made(local, tmp_path):
    """The same, of this test alone."""
    return shutil.copytree(local, tmp_path / "made")


def weights(folder):
    return load_file(folder / json.loads((folder / "manifest.json").read_text())["checkpoint"] / "model.safetensors")


def test_a_bucket_of_which_every_third_answer_fails_is_extracted_into_and_trained_from_as_a_folder_is(
    made, s3, s3_endpoint, monkeypatch
):
    """500s, answers that are cut, lost or never come; s3fs is told to try nothing again by itself."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 1)
    plan = Store(made / "local-store").plan
    cut = windows.cut(Store(made / "local-store").split("train"), 20)
    kept = sum(shard.bytes for shard in plan.of("heldout"))
    most = kept + 2 * max(sum(shard.bytes for shard in window) for window in cut)  # and not the whole store
    assert most < sum(shard.bytes for shard in plan.shards)
    config = tiny_config(made, *MORE, f"store_dir={URL}", f"store.cache_bytes={most}")
    with flaky(s3_endpoint, 0.3) as (endpoint, faults), monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        extract(config)
        loop.train(config)
    assert set(faults) == set(FAULTS), faults
    there = {name.split("/store/")[1] for name in s3.find("bucket")}
    local = {str(path.relative_to(made / "local-store")) for path in (made / "local-store").rglob("*.*")}
    assert there == local
    for name in there - {"manifest.json"}:
        assert s3.cat_file(f"bucket/runs/tiny/store/{name}") == (made / "local-store" / name).read_bytes(), name
    assert_equal(weights(made / "run" / "train"), weights(made / "local"))
    cached = [path for path in config.cache_folder.rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in cached) <= most
    with pytest.raises(
        UserError, match=r"store.cache_bytes=9,000 cannot hold two windows .* lower train.window_tokens"
    ):
        loop.train(tiny_config(made, *MORE, f"store_dir={URL}", "store.cache_bytes=9000", "name=small"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    for launcher_says in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # torchrun, DeepSpeed
        with monkeypatch.context() as patch:
            patch.setenv(launcher_says, "2")
            with pytest.raises(UserError, match=r"several machines train, .* set store.cache_dir=…"):
                loop.train(config)


@pytest.mark.usefixtures("s3_environment", "s3")
def test_a_followed_bucket_is_emptied_of_what_was_trained(made):
    config = tiny_config(made, *MORE, f"store_dir={URL}", "train.epochs=1", "store.max_bytes=1MB", "store.follow=true")
    # Extracted but for the last line, so that it still counts as being written.
    extract(config)
    storage = storage_of(config)
    store = Store(storage)
    storage.remove("manifest.json")
    storage.write("stream.json", seal({"max_bytes": 10**6}))
    loop.train(config)
    left = set(storage.names("shards"))
    assert left == {shard.name for shard in store.plan.of("heldout")}
