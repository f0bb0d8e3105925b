"""What is uploaded and what stays. The hub is a recording in memory."""

import re
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest

from eagle31_train.checkpoint import hub as checkpoint_hub
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.errors import UserError
from eagle31_train.export import export


class Hub:
    """As much of HfApi as an upload needs."""

    def __init__(self):
        self.created, self.files, self.public = None, {}, False

    def create_repo(self, repo, private, exist_ok):
        self.created = (repo, private)
        return f"https://hub/{repo}"

    def model_info(self, _repo):
        return SimpleNamespace(private=not self.public)

    def upload_folder(self, repo_id, folder_path, commit_message, delete_patterns):
        kept = {n: b for n, b in self.files.items() if not any(fnmatch(n, pattern) for pattern in delete_patterns)}
        new = {str(file.relative_to(folder_path)): file for file in folder_path.rglob("*") if file.is_file()}
        self.files = kept | {name: file.read_bytes() for name, file in new.items()}


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(checkpoint_hub, "HfApi", lambda: hub)
    return hub


def test_push_uploads_exactly_the_export(run, hub, capsys):
    run.evaluate()
    export(run.config("push=true", "repo=me/draft", "private=true"))
    assert hub.created == ("me/draft", True)
    out = run.folder / "export"
    assert hub.files == {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    shown = re.findall(r"^!\[.*\]\((.*)\)$", hub.files["README.md"].decode(), re.MULTILINE)
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md", *shown}
    assert '"model": "me/draft"' in capsys.readouterr().out


def test_only_push_sends_and_only_pictures_of_an_earlier_export_leave(run, hub):
    export(run.config("repo=me/draft"))
    assert hub.created is None
    hub.files = dict.fromkeys(["images/acceptance/old.png", "images/comparison-2/gain.png", "images/logo.png"], b"x")
    export(run.config("push=true", "repo=me/draft"))
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md", "images/logo.png"}


def test_a_public_repository_is_not_taken_for_a_private_one(run, hub):
    hub.public = True
    with pytest.raises(UserError, match="me/draft exists and is public"):
        export(run.config("push=true", "repo=me/draft", "private=true"))
    assert hub.files == {}


def test_a_repository_of_the_hub_is_known_by_its_commit(exports, monkeypatch, tmp_path):
    asked = []
    snapshot = tmp_path / ("1" * 40)
    snapshot.symlink_to(exports["llama"].folder / "export")
    monkeypatch.setattr(checkpoint_hub, "snapshot_download", lambda *given, **named: asked.append(named) or snapshot)
    draft = DrafterCheckpoint.open("me/draft", "v1")
    assert (draft.commit, draft.initial_identity) == ("1" * 40, f"me/draft@{'1' * 40}")
    assert draft.tensors
    assert asked[0]["revision"] == "v1"
    assert "*.bin" not in str(asked[0]["allow_patterns"]), "no pickle is fetched"
