"""A store on S3: a server on loopback, reached as any bucket is, through s3fs and the environment."""

import pytest
import s3fs
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error
from storage_contract import RemoteContract, never

from eagle31_train.store.backends import open_storage

CACHE = 1 << 16


class TestS3(RemoteContract):
    @pytest.fixture
    def again(self, s3, tmp_path):
        return lambda: open_storage("s3://bucket/runs/store", tmp_path / "cache", CACHE, sleep=never)

    def test_what_lies_there_is_what_was_written_and_other_stores_are_left_alone(self, storage, s3):
        storage.write("shards/a.json", b"{}")
        assert s3.find("bucket") == ["bucket/runs/store/shards/a.json"]
        assert s3.cat_file("bucket/runs/store/shards/a.json") == b"{}"
        s3.pipe_file("bucket/runs/store-2/a", b"x")
        s3.pipe_file("bucket/a", b"x")
        storage.discard()
        assert s3.find("bucket") == ["bucket/a", "bucket/runs/store-2/a"]


def test_a_server_in_trouble_is_tried_again(s3, tmp_path, monkeypatch):
    """What s3fs makes of the server's own words, not of ours."""
    naps, calls = [], []
    storage = open_storage("s3://bucket/store", tmp_path, CACHE, sleep=naps.append)
    storage.write("a", b"content")
    whole = storage.fs._call_s3.__func__

    async def call(self, method, *args, **kwargs):
        calls.append(method)
        if len(calls) <= 3:
            code = ("InternalError", "ServiceUnavailable", "RequestTimeout")[len(calls) - 1]
            raise translate_boto_error(ClientError({"Error": {"Code": code, "Message": "again later"}}, method))
        return await whole(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    assert storage.read("a") == b"content"
    assert len(calls) > 3
    assert len(naps) in (2, 3)  # s3fs 2024.6 itself tries again after a timeout
