"""Drafts of the hub, against a loopback endpoint that speaks as much of its protocol as a download needs."""

import hashlib
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from safetensors.torch import save

from eagle31_train.checkpoint import hub as checkpoint_hub
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.errors import UserError

COMMITS = {"main": "1" * 40, "v1": "2" * 40}


class Hub:
    """A hub on loopback with the repository me/draft in two revisions, and me/gated."""

    def __init__(self, files):
        self.files, self.fetched = files, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                status, headers, data = hub.answer(self.command, self.path.split("?")[0])
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            do_HEAD = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, command, path):
        """Status, headers, bytes."""
        rest = path.partition("/me/draft/")[2]
        if path.startswith("/api/models/me/gated"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if not rest:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        kind, revision, *name = rest.split("/", 2)
        commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = self.files[commit]
        if kind == "revision":
            info = {"_id": "1", "id": "me/draft", "sha": commit, "private": False, "tags": [], "downloads": 0}
            return 200, {}, json.dumps(info | {"likes": 0, "siblings": []}).encode()
        if kind == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        assert kind == "resolve", path
        if command == "GET":
            self.fetched.append(name[0])
        return 200, {"ETag": f'"{hashlib.sha1(files[name[0]]).hexdigest()}"', "X-Repo-Commit": commit}, files[name[0]]


@pytest.fixture
def hub(exports):
    config, tensors, _ = exports["llama"].exported()
    files = {}
    for commit, mark in zip(COMMITS.values(), (0.5, 0.25), strict=True):
        weights = save({**tensors, "norm.weight": torch.full((16,), mark)})
        files[commit] = {"config.json": json.dumps(config).encode(), "model.safetensors": weights}
        files[commit] |= {"pytorch_model.bin": b"a pickle", "README.md": b"words", "training.log": b"more words"}
    hub = Hub(files)
    yield hub
    hub.close()


def test_a_repository_is_fetched_once_and_without_what_is_not_needed(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    download = partial(snapshot_download, endpoint=hub.url, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(checkpoint_hub, "snapshot_download", download)

    def norm(repo, revision, commit):
        """A number of the weights."""
        draft = DrafterCheckpoint.open(repo, revision)
        assert draft.commit == COMMITS[commit]
        assert draft.initial_identity == f"{repo}@{draft.commit}"
        return draft.tensors["norm.weight"][0].item()

    assert norm("me/draft", None, "main") == norm("me/draft", COMMITS["main"], "main") == 0.5
    assert norm("me/draft", "v1", "v1") == 0.25
    for repo, revision, words in (
        ("me/draft", "v9", "me/draft is no folder here, .*404"),
        ("me/none", None, "me/none is no folder here, .*404"),
        ("me/gated", None, "me/gated is no folder here, .*gated"),
    ):
        with pytest.raises(UserError, match=words):
            DrafterCheckpoint.open(repo, revision)
    # The two revisions have one config.json, which the cache knows by its content.
    assert sorted(hub.fetched) == ["config.json", "model.safetensors", "model.safetensors"]

    # Without a network, what was fetched is found again, and the rest is refused in one line each.
    hub.close()
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert norm("me/draft", "v1", "v1") == 0.25
        with pytest.raises(UserError, match=r"^me/other is no folder here, and cannot be had from the hub"):
            DrafterCheckpoint.open("me/other")
