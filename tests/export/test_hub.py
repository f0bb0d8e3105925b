"""Upload to a loopback endpoint that speaks the hub's protocol and keeps what it was sent."""

import base64
import hashlib
import json
import re
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import HfApi, constants

from eagle31_train.checkpoint import hub as checkpoint_hub
from eagle31_train.errors import UserError
from eagle31_train.export import export


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
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(checkpoint_hub, "HfApi", partial(HfApi, endpoint=hub.url, token="hf_dummy"))
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def test_push_uploads_exactly_the_export(run, hub, capsys):
    run.evaluate()
    export(run.config("push=true", "repo=me/draft", "private=true"))
    assert (hub.created["name"], hub.created["organization"]) == ("draft", "me")
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    out = run.folder / "export"
    assert hub.files == {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    shown = re.findall(r"^!\[.*\]\((.*)\)$", hub.files["README.md"].decode(), re.MULTILINE)
    assert "images/acceptance/workloads-kept.png" in shown
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md", *shown}
    assert hashlib.sha256(hub.files["model.safetensors"]).hexdigest() in hub.blobs
    assert '"model": "me/draft"' in capsys.readouterr().out


def test_only_push_sends_and_only_pictures_of_an_earlier_export_leave(run, hub, capsys):
    export(run.config("repo=me/draft"))
    assert hub.calls == []
    old = ["images/acceptance/old.png", "images/comparison-2/gain.png"]
    hub.files = dict.fromkeys([*old, "images/logo.png", "notes.md"], b"x")
    export(run.config("push=true", "repo=me/draft"))
    assert "export: up to date" in capsys.readouterr().out
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md", "images/logo.png", "notes.md"}


def test_a_public_repository_is_not_taken_for_a_private_one(run, hub):
    hub.exists_publicly = True
    with pytest.raises(UserError, match="me/draft exists and is public"):
        export(run.config("push=true", "repo=me/draft", "private=true"))
    assert hub.files == hub.blobs == {}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, "403 .*: check repo=owner/name, .* that the token may write"),
        ("closed", "check repo=owner/name, the network"),
        ("name", "cannot be uploaded as me/my/draft"),
    ],
)
def test_refusals_are_one_line_with_what_to_do(status, words, tmp_path, hub):
    hub.refuse_with = status if isinstance(status, int) else None
    if status == "closed":
        hub.server.shutdown()
        hub.server.server_close()
    with pytest.raises(UserError, match=words) as error:
        checkpoint_hub.push(tmp_path, "me/my/draft" if status == "name" else "me/draft", private=False)
    assert "\n" not in str(error.value)
    assert hub.files == {}
