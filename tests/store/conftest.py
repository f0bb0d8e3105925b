"""A cache over a file system that is watched."""

import pytest
from caching import Gated

from eagle31_train.store.backends.remote import RemoteStorage


@pytest.fixture
def fs():
    fs = Gated(skip_instance_cache=True)
    for name in "abcdefghijkl":
        fs.pipe_file(f"/store/{name}", name.encode() * 100)
    return fs


@pytest.fixture
def open_cache(fs, tmp_path):
    """`open_cache(bytes)`: another place with the same cache folder."""
    storages = []

    def open_cache(limit, location="gated://store", **options):
        storages.append(RemoteStorage(location, fs, "/store", tmp_path / "cache", limit, **options))
        return storages[-1]

    yield open_cache
    for storage in storages:
        storage.close()
