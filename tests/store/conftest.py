"""What several tests of places share: a cache over a file system with gates, and a place over one with faults."""

import pytest
from caching import Gated, no_sleep
from flaky import Flaky

from eagle31_train.place.remote import RemotePlace


@pytest.fixture
def fs():
    fs = Gated(skip_instance_cache=True)
    for name in "abcdefghijkl":
        fs.pipe_file(f"/store/{name}", name.encode() * 100)
    return fs


@pytest.fixture
def open_cache(fs, tmp_path):
    """`open_cache(bytes)`: another place with the same cache folder."""
    places = []

    def open_cache(limit, location="gated://store", **options):
        options = {"sleep": no_sleep} | options
        places.append(RemotePlace(location, fs, "/store", tmp_path / "cache", limit, **options))
        return places[-1]

    yield open_cache
    for gate in fs.gates.values():
        gate.set()
    for place in places:
        place.close()


@pytest.fixture
def flaky():
    return Flaky(skip_instance_cache=True)


@pytest.fixture
def naps():
    return []


@pytest.fixture
def place(flaky, naps, tmp_path):
    place = RemotePlace("flaky://bucket/store", flaky, "/bucket/store", tmp_path / "cache", 1000, sleep=naps.append)
    yield place
    place.close()
