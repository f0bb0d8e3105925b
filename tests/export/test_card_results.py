"""Results on their way to the card: their own pictures, no other checkpoint's, and weights that stay as they are."""

import json

import pytest
import torch
from made import message_of
from sample_results import serving

from eagle31_train import export
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.common import artifacts


def compared(run, folder, rate=0.5, second="B", identities=None, **more):
    told = {**run.result(rate, "A", second), "trainings": {"A": ["runs/a"], second: ["runs/b"]}, **more}
    told["identities"] = {"A": ["0" * 16], second: identities or ["1" * 16, run.identity]}
    artifacts.write_json(folder / "result.json", {**told, "files": run.draw(folder, told)})
    return folder


def record(run):
    return json.loads((run.folder / "export.json").read_text())


def weights(run):
    return (run.folder / "export" / "model.safetensors").read_bytes()


def test_new_results_make_a_new_card_of_the_same_weights(run, tmp_path, capsys):
    export.export(run.config())
    before, checkpoint = weights(run), record(run)["checkpoint"]
    run.evaluate(0.3)
    export.export(run.config())
    first = run.exported()[2]
    assert "Kept of the plain form" in first
    served = {"inputs": {"train": "e" * 16, "export": checkpoint}, "serving": serving()}
    served["files"] = run.draw(run.folder / "serving", {"serving": serving()})
    artifacts.write_json(run.folder / "serving" / "manifest.json", served)
    run.evaluate(0.7)
    export.export(run.config())
    assert run.exported()[2] != first
    assert "B: at concurrency 1 " in run.exported()[2]
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


@pytest.mark.parametrize("measured_in", ["float32", "bfloat16"])
def test_acceptance_of_weights_rounded_otherwise_is_not_claimed(run, capsys, measured_in):
    run.evaluate(dtype=measured_in)
    export.export(run.config("target.dtype=bfloat16"))
    left_out = "is of weights rounded to float32, not to bfloat16" in capsys.readouterr().out
    claimed = "was not measured" not in run.exported()[2].split("## Measured in vLLM")[0]
    assert (left_out, claimed) == (measured_in == "float32", measured_in == "bfloat16")


def test_a_comparison_of_weights_rounded_otherwise_is_refused(run, tmp_path):
    export.export(run.config("target.dtype=bfloat16", f"comparisons=[{compared(run, tmp_path, weights='bfloat16')}]"))
    assert "drafters' weights rounded to bfloat16" in run.exported()[2]
    compared(run, tmp_path, weights="float32")
    refused = message_of(export.export, run.config("target.dtype=bfloat16", f"comparisons=[{tmp_path}]"))
    assert "is of weights rounded to float32, not to bfloat16: compare again with target.dtype=bfloat16" in refused


def test_pictures_of_another_result_are_not_on_the_card(run):
    """One that was measured later and stopped has the same names."""
    run.evaluate()
    picture = next((run.folder / "evaluate").glob("*.png"))
    picture.write_bytes(picture.read_bytes() + b"another")
    assert picture.name in message_of(export.export, run.config())


def test_a_comparison_of_the_export_itself_is_on_its_card(run, tmp_path):
    """Of a smaller one there is no other way to be compared."""
    options = ["export_sliding_window=8"]
    export.export(run.config(*options))
    compared(run, tmp_path, second="last", identities=[DrafterCheckpoint.open(str(run.folder / "export")).identity])
    export.export(run.config(*options, f"comparisons=[{tmp_path}]"))
    assert "last" in run.exported()[2]
    whole = run.config(f"comparisons=[{tmp_path}]", "overwrite=true")
    assert "A, last, none of which has the weights that are exported" in message_of(export.export, whole)


@pytest.mark.parametrize("trained", ["of other inputs", "again, to other weights", "it is not said"])
def test_acceptance_of_other_weights_is_not_claimed(trained, run, capsys):
    run.evaluate()
    export.export(run.config())
    assert "acceptance of this checkpoint was not measured" not in run.exported()[2]
    assert "is of another drafter" not in capsys.readouterr().out
    if trained == "of other inputs":
        file = run.folder / "train" / "manifest.json"
        artifacts.write_json(file, {**artifacts.read_json(file, ""), "fingerprint": "0" * 16})
    elif trained == "it is not said":  # by an earlier version
        file = run.folder / "evaluate" / "manifest.json"
        artifacts.write_json(file, {**artifacts.read_json(file, ""), "inputs": {}})
    else:
        run.change_tensors(norm__weight=torch.full((16,), 0.5))
    export.export(run.config("overwrite=true"))
    assert "The acceptance of this checkpoint was not measured." in run.exported()[2]
    what = "is of another drafter (its weights, format, draft tokens or window differ) or of an earlier version"
    warning = f"{run.folder}/evaluate {what}, so the card leaves it out: run"
    assert capsys.readouterr().out.count(warning) == 1
