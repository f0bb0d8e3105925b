"""What several tests of storages share: a cache over a file system with gates, and a storage over one with faults."""

import pytest
from caching import Gated
from flaky import Flaky

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
    for gate in fs.gates.values():
        gate.set()
    for storage in storages:
        storage.close()


@pytest.fixture
def flaky():
    return Flaky(skip_instance_cache=True)


@pytest.fixture
def naps():
    return []


@pytest.fixture
def storage(flaky, naps, tmp_path):
    storage = RemoteStorage("flaky://bucket/store", flaky, "/bucket/store", tmp_path / "cache", 1000, sleep=naps.append)
    yield storage
    storage.close()
