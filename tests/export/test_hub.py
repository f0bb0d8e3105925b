"""Upload to a loopback endpoint that speaks the hub's protocol and keeps what it was sent.

huggingface_hub reads HF_ENDPOINT when it is imported, so each export runs in a process of its own.
"""

import base64
import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import HfApi

from eagle31_train.cli import ROOT
from eagle31_train.hub import push
from eagle31_train.schema import UserError


class Hub:
    """What the endpoint was told, and how it is to answer."""

    def __init__(self):
        self.calls: list[str] = []
        self.created: dict = {}
        self.blobs: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.exists_publicly = False
        self.refuse_with: int | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.calls.append(f"{self.command} {self.path.split('?')[0]}")
                status, value = hub.handle(self.command, self.path.split("?")[0], body, self.headers)
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_HEAD = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def handle(self, method, path, body, headers):
        if self.refuse_with:
            return self.refuse_with, {"error": "refused"}
        assert headers["Authorization"] == "Bearer hf_dummy" or method == "PUT"
        if path == "/api/repos/create":
            self.created = json.loads(body)
            if self.exists_publicly:
                return 409, {"error": "exists", "url": f"{self.url}/me/draft"}
            return 200, {"url": f"{self.url}/me/draft"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            wanted = json.loads(body)["files"]
            modes = {True: "lfs", False: "regular"}
            answer = [
                {"path": f["path"], "uploadMode": modes[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                for f in wanted
            ]
            return 200, {"files": answer}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.url}/blob/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path.startswith("/blob/"):
            self.blobs[path.rsplit("/", 1)[1]] = body
            return 200, {}
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    self.files[value["path"]] = self.blobs[value["oid"]]
                if line["key"] == "deletedFile":
                    del self.files[value["path"]]
            return 200, {"commitUrl": f"{self.url}/me/draft/commit/1", "commitOid": "1" * 40}
        if path.endswith("/tree/main"):
            found = [{"type": "file", "path": name, "size": 1, "oid": "1" * 40} for name in self.files]
            return 200, found
        if path in ("/api/models/me/draft", "/api/models/me/draft/revision/main"):
            info = {"_id": "1", "id": "me/draft", "private": not self.exists_publicly, "sha": "1" * 40, "tags": []}
            return 200, info | {"siblings": [], "downloads": 0, "likes": 0}
        return 404, {"error": f"{method} {path}"}


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def export(run, endpoint, *options, token="hf_dummy"):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(run.folder.parent / "hf-home"),
        "OMP_NUM_THREADS": "1",
    }
    if token:
        environment["HF_TOKEN"] = token
    return subprocess.run(
        [sys.executable, "-m", "eagle31_train.export", *run.overrides(), *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_push_uploads_exactly_the_export(run, hub):
    run.evaluate()
    done = export(run, hub.url, "push=true", "repo=me/draft", "private=true")
    assert done.returncode == 0, done.stderr
    assert (hub.created["name"], hub.created["organization"]) == ("draft", "me")
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    out = run.folder / "export"
    files = {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert hub.files == files
    shown = re.findall(r"^!\[.*\]\((.*)\)$", hub.files["README.md"].decode(), re.MULTILINE)
    assert "images/acceptance/workloads-kept.png" in shown
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md", *shown}
    assert hashlib.sha256(hub.files["model.safetensors"]).hexdigest() in hub.blobs
    assert '"model": "me/draft"' in done.stdout


def test_pictures_of_an_earlier_export_leave_and_nothing_else_does(run, hub):
    old = ["images/acceptance/old.png", "images/comparison-2/gain.png"]
    hub.files = dict.fromkeys([*old, "images/logo.png", "notes.md"], b"x")
    assert export(run, hub.url, "push=true", "repo=me/draft").returncode == 0
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md", "images/logo.png", "notes.md"}


def test_nothing_is_sent_without_push(run, hub):
    done = export(run, hub.url, "repo=me/draft")
    assert done.returncode == 0, done.stderr
    assert hub.calls == []


def test_a_finished_export_can_be_pushed_later(run, hub):
    assert export(run, hub.url, "repo=me/draft").returncode == 0
    done = export(run, hub.url, "repo=me/draft", "push=true")
    assert "export: up to date" in done.stdout
    assert "model.safetensors" in hub.files


def test_a_public_repository_is_not_taken_for_a_private_one(run, hub):
    hub.exists_publicly = True
    done = export(run, hub.url, "push=true", "repo=me/draft", "private=true")
    assert done.returncode == 2
    assert "me/draft exists and is public" in done.stderr
    assert hub.files == {}
    assert hub.blobs == {}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "the hub refused the token: run `hf auth login`"),
        (403, "may not write to me/draft"),
        (404, "is the owner's name right"),
        (507, "run the same command again later"),
    ],
)
def test_refusals_are_one_line_with_what_to_do(status, said, run, hub):
    hub.refuse_with = status
    done = export(run, hub.url, "push=true", "repo=me/draft")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert (run.folder / "export.json").is_file(), "the export itself is done, only the upload failed"


def test_no_token_is_one_line_with_what_to_do(run, hub):
    hub.refuse_with = 401  # what the hub answers to a call without a token
    done = export(run, hub.url, "push=true", "repo=me/draft", token=None)
    assert done.returncode == 2
    assert "`hf auth login`" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_endpoint_that_is_not_there_is_one_line(run, hub):
    hub.server.shutdown()
    hub.server.server_close()
    done = export(run, hub.url, "push=true", "repo=me/draft")
    assert done.returncode == 2
    assert "error: the hub cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_read_is_no_matter_of_the_network(tmp_path, monkeypatch):
    def unreadable(*_args, **_named):
        raise PermissionError(errno.EACCES, "Permission denied", "draft/model.safetensors")

    monkeypatch.setattr(HfApi, "create_repo", lambda *_args, **_named: "address")
    monkeypatch.setattr(HfApi, "upload_folder", unreadable)
    with pytest.raises(UserError, match=r"^draft/model\.safetensors cannot be uploaded \(Permission denied\)"):
        push(tmp_path, "me/draft", private=False)


def test_a_name_that_is_no_repository_is_one_line(run, hub):
    done = export(run, hub.url, "push=true", "repo='me/my/draft'")
    assert done.returncode == 2
    assert "is no hub repository name" in done.stderr
    assert hub.files == {}
