"""Results on their way to the card: their own pictures, no other checkpoint's, and weights that stay as they are."""

import json
import re
from typing import ClassVar

import pytest
import torch

from eagle31_train import artifacts, evaluate, export
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.errors import UserError
from eagle31_train.evaluation.serving import Engine
from eagle31_train.provenance import Provenance
from eagle31_train.reporting import card

SPEED = {
    "ttft": {"mean": 0.05, "p50": 0.05, "p95": 0.06},
    "tpot": {"mean": 0.01, "p50": 0.01, "p95": 0.02},
    "counted": {"ttft": 0.05, "tpot": None},
    "total": 9.5,
    "acceptance": None,
    "different": 0,
    "requests": 4,
}
SERVING = {
    **{"definitions": "TTFT: …", "vllm": "0.32.0", "dtype": "float32", "prompts": 4, "max_new_tokens": 48},
    **{"temperature": 0.0, "top_p": 1.0, "verdict": ["ours: speculation does not pay."], "notes": []},
    "rows": [
        {"drafter": name, "draft_tokens": 3 if name else 0, "concurrency": 1, "per_user": [9, 8, 10], "speedup": None}
        | SPEED
        for name in (None, "ours")
    ],
}


def served(run, checkpoint):
    folder = run.folder / "serving"
    files = run.draw(folder, {"serving": SERVING})
    inputs = {"train": "e" * 16, "export": checkpoint}
    artifacts.write_json(folder / "manifest.json", {"inputs": inputs, "serving": SERVING, "files": files})


def compared(run, folder, ours=None, rate=0.5):
    told = {**run.result(rate, "A", "B"), "trainings": {"A": ["runs/a"], "B": ["runs/b"]}}
    told["identities"] = {"A": ["0" * 16], "B": ["1" * 16, ours or run.identity]}
    artifacts.write_json(folder / "result.json", {**told, "files": run.draw(folder, told)})
    return folder


def of_an_earlier_version(run, folder):
    told = json.loads((folder / "result.json").read_text())
    del told["files"]
    artifacts.write_json(folder / "result.json", told)


def record(run):
    return json.loads((run.folder / "export.json").read_text())


def weights(run):
    file = run.folder / "export" / "model.safetensors"
    return file.stat().st_ino, file.stat().st_mtime_ns, file.read_bytes()


def test_the_card_shows_pictures_that_are_there_and_that_the_record_lists(run, tmp_path):
    run.evaluate()
    export.export(run.config())
    served(run, record(run)["checkpoint"])
    export.export(run.config(f"comparisons=[{compared(run, tmp_path / 'cmp')}]"))
    out, body = run.folder / "export", run.exported()[2]
    shown = re.findall(r"^!\[[^\]]+\]\((images/[\w./-]+\.png)\)$", body, re.MULTILINE)
    there = [str(file.relative_to(out)) for file in (out / "images").rglob("*") if file.is_file()]
    assert sorted(shown) == sorted(there)
    assert len(set(shown)) == len(shown)
    assert {name.split("/")[1] for name in shown} == {"acceptance", "serving", "comparison-1"}
    for name in shown:
        room = name.split("/")[1].replace("acceptance", "evaluate").replace("comparison-1", "cmp")
        assert (out / name).read_bytes().startswith(f"{room} {name.split('/')[2][:-4]} ".encode()), "another's picture"
    files = {str(file.relative_to(run.folder)) for file in out.rglob("*") if file.is_file()}
    assert record(run)["files"].keys() == files
    assert "ours: speculation does not pay." in body
    assert "This checkpoint is B." in body
    assert str(tmp_path) not in body
    draft = DrafterCheckpoint.open(out, target_layers=lambda: 9)
    assert draft.shape == run.shape, "pictures do not confuse who reads the folder"


def test_new_results_make_a_new_card_and_touch_no_weights(run, tmp_path, capsys):
    export.export(run.config())
    before, checkpoint = weights(run), record(run)["checkpoint"]
    run.evaluate(0.3)
    export.export(run.config())
    first = run.exported()[2]
    assert "Kept of the plain form" in first
    served(run, checkpoint)
    run.evaluate(0.7)
    export.export(run.config())
    assert run.exported()[2] != first
    assert "speculation does not pay" in run.exported()[2]
    folder = compared(run, tmp_path / "cmp")
    export.export(run.config(f"comparisons=[{folder}]"))
    export.export(run.config(f"comparisons=[{compared(run, folder, rate=0.7)}]"))
    assert weights(run) == before
    assert record(run)["checkpoint"] == checkpoint
    capsys.readouterr()
    export.export(run.config(f"comparisons=[{folder}]"))
    assert "export: up to date" in capsys.readouterr().out
    export.export(run.config())
    assert not (run.folder / "export" / "images" / "comparison-1").exists(), "what the card no longer tells is gone"


@pytest.mark.parametrize("trained", ["of other inputs", "again, to other weights"])
def test_acceptance_of_other_weights_is_not_claimed(trained, run, capsys):
    run.evaluate()
    export.export(run.config())
    assert "acceptance of this checkpoint was not measured" not in run.exported()[2]
    assert capsys.readouterr().out.count("is of other weights") == 0
    file = run.folder / "train" / "manifest.json"
    if trained == "of other inputs":
        artifacts.write_json(file, {**artifacts.read_json(file, ""), "fingerprint": "0" * 16})
    else:
        run.change_tensors(norm__weight=torch.full((16,), 0.5))
        assert artifacts.read_json(file, "")["fingerprint"] == "e" * 16
    export.export(run.config("overwrite=true"))
    assert "The acceptance of this checkpoint was not measured." in run.exported()[2]
    warning = f"{run.folder}/evaluate is of other weights or an earlier version, and not on the card: run `python -m"
    assert capsys.readouterr().out.count(warning) == 1


def test_a_local_target_is_named_without_its_path_and_links_nowhere(run, tmp_path):
    local = tmp_path / "secret-place" / "my | target"
    local.mkdir(parents=True)
    export.export(run.config(f"target.path='{local}'"))
    config, _, text = run.exported()
    assert "base_model" not in text
    assert "drafter for my \\| target" in text
    assert config["target_model_name"] == "my | target"
    assert "vllm serve '/path/to/my | target' --spec" in text
    assert "secret-place" not in text + json.dumps(config)


def test_words_alone_renew_the_card_too(run):
    run.evaluate()
    export.export(run.config())
    path = run.folder / "evaluate" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["report"]["not_measured"] = ["agent"]
    artifacts.write_json(path, manifest)
    export.export(run.config())
    assert "none of its prompts was decoded: agent." in run.exported()[2]


def test_a_new_card_does_not_make_the_serving_result_stale(run, monkeypatch, capsys):
    """The whole way: export, serve, export for the card, serve again: nothing to do."""

    class Asked:
        name, prompts = "heldout", ()
        remarks: ClassVar = ["first turns alone", "left out long: too many tokens"]

    monkeypatch.setattr(evaluate, "made_from", lambda config, data, drafter, engine: Provenance(drafter))
    monkeypatch.setattr(evaluate.evaluating, "choose_workloads", lambda *_: [Asked])
    monkeypatch.setattr(evaluate, "check_serving", lambda _: Engine("0.0", "8 × GPU"))
    monkeypatch.setattr(
        evaluate, "measure_serving", lambda *given: json.loads(json.dumps(SERVING)) | {"machine": given[-1].device}
    )
    manifest = {**data_manifest(run), "end_ids": [2]}
    artifacts.write_json(run.folder / "data" / "manifest.json", manifest)
    export.export(run.config())
    artifacts.write_json(run.folder / "data" / "manifest.json", {**manifest, "dataset_fingerprint": "of other data"})
    with pytest.raises(UserError, match="not the data that the drafter was trained on"):
        evaluate.serve(run.config())
    artifacts.write_json(run.folder / "data" / "manifest.json", manifest)
    evaluate.serve(run.config())
    export.export(run.config())
    assert "speculation does not pay" in run.exported()[2]
    served = json.loads((run.folder / "serving" / "manifest.json").read_text())["serving"]
    assert served["workload"] == "heldout"
    assert served["notes"] == ["first turns alone", "left out long: too many tokens"]
    assert served["machine"] == "8 × GPU"
    assert (run.folder / "export" / "images" / "serving" / "serving-ours.png").is_file()
    capsys.readouterr()
    evaluate.serve(run.config())
    assert "evaluate: up to date" in capsys.readouterr().out
    run.change_tensors(norm__weight=torch.full((16,), 0.5))
    with pytest.raises(UserError, match=r"export has other weights than .*train: run `.*` again, with overwrite=true"):
        evaluate.serve(run.config())
    export.export(run.config("overwrite=true"))
    assert "speculation does not pay" not in run.exported()[2], "other weights were served"
    assert f"{run.folder}/serving is of other weights" in capsys.readouterr().out
    (run.folder / "export" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config.json has 2 bytes.*: run `python -m eagle31_train.export` again"):
        evaluate.serve(run.config())


def data_manifest(run):
    return json.loads((run.folder / "data" / "manifest.json").read_text())


def test_serving_needs_an_export_that_knows_its_checkpoint(run):
    export.export(run.config())
    old = record(run)
    del old["checkpoint"]
    artifacts.write_json(run.folder / "export.json", old)
    with pytest.raises(UserError, match=r"export.json is of an earlier version: run `python -m eagle31_train.export`"):
        evaluate.serve(run.config())


def test_serving_of_another_checkpoint_is_not_told(run):
    served(run, "0" * 16)
    export.export(run.config())
    assert "How fast vLLM is with this checkpoint was not measured." in run.exported()[2]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda run, folder: (folder / "result.json").unlink(), "has no result.json: give the folder that"),
        (lambda run, folder: (folder / "result.json").write_text("[1]"), "is damaged (not a JSON object)"),
        (lambda run, folder: (folder / "result.json").write_text("{}"), "so it is no comparison"),
        (lambda run, folder: compared(run, folder, ours="2" * 16), "none of which has the weights in train/"),
        (lambda run, folder: compared(run, folder, ours="e" * 16), "none of which has the weights in train/"),
        (lambda run, folder: run.change_tensors(norm__weight=torch.ones(16)), "none of which has the weights in"),
        (lambda run, folder: (folder / "heldout-gain.png").unlink(), "heldout-gain.png is missing: run"),
        # As a comparison leaves it that drew other numbers and was stopped then.
        (
            lambda run, folder: run.draw(folder, run.result(0.7, "A", "B")),
            "damaged or replaced: run `python -m eagle",
        ),
        (of_an_earlier_version, "result.json has no files, so it is no comparison, or one of an earlier version: run"),
    ],
)
def test_what_is_no_comparison_of_this_checkpoint_is_refused_in_one_line(spoil, said, run, tmp_path):
    export.export(run.config())
    folder = compared(run, tmp_path / "cmp")
    spoil(run, folder)
    before = run.listing()
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        export.export(run.config(f"comparisons=[{folder}]"))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert run.listing() == before


def test_a_damaged_picture_is_refused(run):
    run.evaluate()
    (run.folder / "evaluate" / "workloads-acceptance.png").write_bytes(b"half")
    with pytest.raises(UserError, match=r"workloads-acceptance.png has 4 bytes.*eagle31_train.evaluate"):
        export.export(run.config())
    assert not (run.folder / "export").exists()


def test_damaged_weights_do_not_stay_for_a_new_card(run):
    export.export(run.config())
    good = weights(run)[2]
    (run.folder / "export" / "model.safetensors").write_bytes(b"\0" * len(good))
    run.evaluate()
    export.export(run.config())
    assert weights(run)[2] == good


def test_a_card_that_fails_leaves_the_old_export_whole(run, monkeypatch):
    export.export(run.config())
    before, listing = run.exported()[2], run.listing()
    run.evaluate()
    new = sorted({*run.listing()} - {*listing})
    with monkeypatch.context() as patch:
        patch.setattr(card, "render", lambda facts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export.export(run.config())
    assert run.exported()[2] == before
    assert run.listing() == sorted([*listing, *new])
    assert artifacts.first_damaged(run.folder, record(run)["files"]) is None


def test_a_kill_before_the_new_folder_has_its_name_is_made_good(run, monkeypatch):
    export.export(run.config())
    before = weights(run)[2]
    run.evaluate()
    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "commit", killed_at("export", artifacts.commit))
        with pytest.raises(KeyboardInterrupt):
            export.export(run.config())
    assert weights(run)[2] == before, "whoever serves it goes on"
    export.export(run.config())
    assert "Kept of the plain form" in run.exported()[2]
    assert weights(run)[2] == before
    assert artifacts.first_damaged(run.folder, record(run)["files"]) is None


def killed_at(name, commit):
    def committed(temporary, final):
        if final.name == name:
            raise KeyboardInterrupt
        commit(temporary, final)

    return committed
