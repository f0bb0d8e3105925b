"""Drafts of the hub, against a loopback endpoint that speaks as much of its protocol as a download needs."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import save

from eagle31_train.cli import ROOT
from eagle31_train.export import export

COMMITS = {"main": "1" * 40, "v1": "2" * 40}
# What it prints for each repository and revision: the folder and one number of its weights, or what refused it.
SCRIPT = """
import sys
from eagle31_train import published
from eagle31_train.cli import ROOT
from eagle31_train.schema import UserError
for asked in sys.argv[1:]:
    repo, _, revision = asked.partition("@")
    try:
        folder = published.fetch(repo, revision or None)
        print(folder.name, published.read(folder, "x", int).tensors["norm.weight"][0].item())
    except UserError as error:
        print(error)
"""


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
def hub(run):
    export(run.config("target.dtype=float32"))
    config, tensors, _ = run.exported()
    files = {}
    for commit, mark in zip(COMMITS.values(), (0.5, 0.25), strict=True):
        weights = save({**tensors, "norm.weight": torch.full((16,), mark)})
        files[commit] = {"config.json": json.dumps(config).encode(), "model.safetensors": weights}
        files[commit] |= {"pytorch_model.bin": b"a pickle", "README.md": b"words", "training.log": b"more words"}
    hub = Hub(files)
    yield hub
    hub.close()


def fetch(hub, home, *asked, **environment):
    """One line for each that is asked for, of a process of its own: huggingface_hub reads HF_ENDPOINT once."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, *asked]
    done = subprocess.run(command, cwd=ROOT, env=kept | ours | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_repository_is_fetched_once_and_without_what_is_not_needed(hub, tmp_path):
    home = tmp_path / "home"
    main, v1, commit, revision, missing, gated = fetch(
        hub, home, "me/draft", "me/draft@v1", f"me/draft@{COMMITS['main']}", "me/draft@v9", "me/none", "me/gated"
    )
    assert main == commit == f"{COMMITS['main']} 0.5"
    assert v1 == f"{COMMITS['v1']} 0.25"
    assert revision == "the hub repository me/draft has no revision v9"
    assert missing.startswith("me/none is no folder here, and no repository of the hub either")
    assert gated.startswith("the hub repository me/gated is gated: accept its terms there")
    # The two revisions have one config.json, which the cache knows by its content.
    assert sorted(hub.fetched) == ["config.json", "model.safetensors", "model.safetensors"]

    # Without a network, what was fetched is found again, and the rest is refused in one line each.
    hub.close()
    for offline in ({"HF_HUB_OFFLINE": "1"}, {}):
        again, other = fetch(hub, home, "me/draft@v1", "me/other", **offline)
        assert again == v1
        assert other.startswith("me/other is no folder here, and cannot be had from the hub (")
