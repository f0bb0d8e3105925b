"""What is uploaded and what stays. The hub is one on loopback."""

import re
from unittest.mock import Mock

import pytest
from huggingface_hub.utils import filter_repo_objects
from loopback_hub import serving_hub
from made import message_of

from eagle31_train.checkpoint import hub as checkpoint_hub
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.export import export


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serving_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def test_push_uploads_exactly_the_export(run, hub, capsys):
    run.evaluate()
    export(run.config("push=true", "repo=me/draft", "private=true"))
    assert hub.repositories["me/draft"][0] is True, "private"
    out, files = run.folder / "export", hub.files("me/draft")
    assert files == {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    shown = re.findall(r"^!\[.*\]\((.*)\)$", files["README.md"].decode(), re.MULTILINE)
    assert files.keys() == {"config.json", "model.safetensors", "README.md", *shown}
    assert '"model": "me/draft"' in capsys.readouterr().out


def test_only_push_sends_and_only_pictures_of_an_earlier_export_leave(run, hub):
    export(run.config("repo=me/draft"))
    assert hub.repositories == {}
    earlier = ["images/acceptance/old.png", "images/comparison-2/gain.png", "images/logo.png"]
    hub.repositories["me/draft"] = False, [dict.fromkeys(earlier, b"x")]
    export(run.config("push=true", "repo=me/draft"))
    assert hub.files("me/draft").keys() == {"config.json", "model.safetensors", "README.md", "images/logo.png"}


def test_a_card_edited_on_the_hub_is_replaced_only_if_asked(run, hub):
    push = run.config("push=true", "repo=me/draft")
    export(push)
    export(push)  # over a card of ours
    hub.repositories["me/draft"][1].append({**hub.files("me/draft"), "README.md": b"by hand"})
    assert "the card (README.md) of the hub repository me/draft was edited there" in message_of(export, push)
    assert hub.files("me/draft")["README.md"] == b"by hand"
    export(run.config("push=true", "repo=me/draft", "overwrite=true"))
    assert hub.files("me/draft")["README.md"] == (run.folder / "export/README.md").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-00001-of-00002.safetensors"])
def test_nothing_is_uploaded_beside_other_weights(name, run, hub):
    """vLLM would read the index, and so the earlier shards, or all files in turn."""
    hub.repositories["me/draft"] = False, [{name: b"x", "model.safetensors": b"x", "original/old.safetensors": b"x"}]
    said = message_of(export, run.config("push=true", "repo=me/draft"))
    assert f"the hub repository me/draft has other weights ({name})" in said
    assert hub.files("me/draft")["model.safetensors"] == b"x"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("private=true", "me/draft is public"),
        # In that format vLLM would look for the target's revision in the drafter's repository.
        ("export_format=speculators target.revision=abc", "cannot name target.revision"),
    ],
)
def test_what_may_not_be_uploaded_is_not(options, said, run, hub):
    hub.repositories["me/draft"] = False, []
    assert said in message_of(export, run.config("push=true", "repo=me/draft", *options.split()))
    assert hub.files("me/draft") == {}


def test_of_what_the_hubs_client_says_the_first_line_is_shown(monkeypatch):
    refuse = Mock(side_effect=OSError("no connection\nPlease check everything."))
    monkeypatch.setattr(checkpoint_hub, "snapshot_download", refuse)
    said = message_of(DrafterCheckpoint.open, "me/draft")
    assert "be downloaded from the hub (no connection): check the name" in said


def test_a_repository_of_the_hub_is_known_by_its_commit(exports, monkeypatch, tmp_path):
    asked = []
    snapshot = tmp_path / ("1" * 40)
    snapshot.symlink_to(exports["llama"].folder / "export")
    monkeypatch.setattr(checkpoint_hub, "snapshot_download", lambda *given, **named: asked.append(named) or snapshot)
    draft = DrafterCheckpoint.open("me/draft", "v1")
    assert (draft.commit, draft.initial_identity) == ("1" * 40, f"me/draft@{'1' * 40}")
    assert draft.tensors
    assert asked[0]["revision"] == "v1"
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    there = ["config.json", *shards, "README.md", "pytorch_model.bin"]
    fetched = filter_repo_objects(there, allow_patterns=asked[0]["allow_patterns"])
    assert list(fetched) == there[:-2], "no pickle, and of several files the index that names them"
