"""A hub on loopback: as much of its interface as making a repository, uploading to it and downloading from it need.

A card whose metadata the library's own types do not take is refused, as the hub refuses one.
"""

import base64
import hashlib
import json
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from urllib.parse import parse_qs

import yaml
from answering import Quiet, serving
from huggingface_hub import ModelCardData, constants


def problems_of(card):
    """What is wrong with the metadata of a card's text."""
    try:
        metadata = yaml.safe_load(card.split("---\n")[1])
        data = ModelCardData(**metadata, ignore_metadata_errors=False)
        unknown = metadata.keys() - {"base_model", "datasets", "library_name", "pipeline_tag", "tags"}
        lists = [metadata.get(name, []) for name in ("tags", "datasets")]
        flat = all(isinstance(item, str) for some in lists for item in some)
        return [] if flat and not unknown and data.to_dict() == metadata else [f"{unknown or metadata}"]
    except (IndexError, TypeError, ValueError, yaml.YAMLError) as error:
        return [str(error)]


class Hub(ThreadingHTTPServer):
    """repositories: name → (whether private, commits, each file → bytes)."""

    def __init__(self):
        self.repositories, self.cards, self.titles = {}, [], {}
        super().__init__(("127.0.0.1", 0), Handler)

    def commit(self, name):
        """Number of the newest commit, as the hub writes it."""
        return f"{len(self.repositories[name][1]):040x}"

    def last_commit(self, name, file):
        """The newest commit that changed a file, as the hub tells it. One that nobody made over HTTP has a title of
        the hub's editor."""
        commits = [{}, *self.repositories[name][1]]
        number = max(i for i in range(1, len(commits)) if commits[i].get(file) != commits[i - 1].get(file))
        title = self.titles.get((name, number), f"Update {file}")
        return {"id": f"{number:040x}", "title": title, "date": "2026-01-01T00:00:00.000Z"}

    def files(self, name, commit=None):
        commits = self.repositories[name][1]
        return commits[(int(commit, 16) if commit and len(commit) == 40 else len(commits)) - 1] if commits else {}


class Handler(Quiet):
    def reply(self, value=b"", status=200, **headers):
        super().reply(value if isinstance(value, bytes) else json.dumps(value).encode(), status, **headers)

    def do_POST(self):
        body, address = self.body(), f"http://127.0.0.1:{self.server.server_port}"
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.server.repositories.setdefault(name, (private, []))
            return self.reply({"url": f"{address}/{name}", "name": name})
        if path == "/api/validate-yaml":
            card = json.loads(body)["content"]
            self.server.cards.append(card)
            found = [{"message": problem} for problem in problems_of(card)]
            return self.reply({"errors": found, "warnings": []}, 400 if found else 200)
        name = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            files = [one["path"] for one in json.loads(body)["files"]]  # all in the commit, as the hub takes small ones
            return self.reply({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]})
        if "/paths-info/" in path:
            there = self.server.files(name)
            asked = [one for one in parse_qs(body.decode())["paths"] if one in there]
            facts = [{"path": p, "size": len(there[p]), "lastCommit": self.server.last_commit(name, p)} for p in asked]
            return self.reply([{"type": "file", "oid": one["path"], **one} for one in facts])
        files = dict(self.server.files(name))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.server.titles[name, len(self.server.repositories[name][1]) + 1] = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.server.repositories[name][1].append(files)
        commit = self.server.commit(name)
        return self.reply({"commitUrl": f"{address}/{name}/commit/{commit}", "commitOid": commit})

    def do_GET(self):
        path = self.path.split("?")[0].strip("/")
        if path.startswith("api/models/"):
            _, _, owner, repository, *rest = path.split("/")
            name = f"{owner}/{repository}"
            if name not in self.server.repositories:
                return self.reply({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            files = self.server.files(name)
            if rest[:1] == ["tree"]:
                return self.reply([{"type": "file", "path": p, "size": len(b), "oid": p} for p, b in files.items()])
            siblings = [{"rfilename": file} for file in files]
            private = self.server.repositories[name][0]
            sha = self.server.commit(name)
            return self.reply({"id": name, "modelId": name, "sha": sha, "private": private, "siblings": siblings})
        name, _, place = path.partition("/resolve/")
        revision, _, file = place.partition("/")
        content = self.server.files(name, revision)[file]
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self.reply(content, ETag=tag, X_Repo_Commit=self.server.commit(name))

    do_HEAD = do_GET


@contextmanager
def serving_hub(monkeypatch, cache):
    """A hub that huggingface_hub takes for its own, with an empty cache, while the `with` block lasts."""
    hub = Hub()
    address = f"http://127.0.0.1:{hub.server_port}"
    for name, value in {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with serving(hub):
        yield hub
