"""Drafters side by side, as a user calls it: what can be compared, and which is better."""

import json
import re

import pytest

from eagle31_train import artifacts, export
from tests.evaluation.conftest import SHAPE

pytestmark = pytest.mark.usefixtures("no_page")

PROMPTS = [{"id": f"q{i}", "source": "ab"[i % 2], "prompt": f"hello {'again ' * i}world"} for i in range(12)]
SHORT = ("evaluate.max_new_tokens=4", "evaluate.max_speculative_tokens=3")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in PROMPTS))
    return f"evaluate.prompts={file}"


# ---------------------------------------------------------------- which is better


def test_a_drafter_that_is_better_is_called_so(trained, another, call, monkeypatch, prompts):
    monkeypatch.setattr("tests.evaluation.conftest.HELDOUT", [[2, 5, *[7] * i, 6, 3] for i in range(12)])
    good = another("good", good=True)
    result = call(trained.folder, good.folder, prompts, "compare.verified=12")
    (workload,) = result["workloads"]
    assert (workload["name"], workload["prompts"], workload["verified"]) == ("prompts", 12, 12)
    assert result["title"] == "good against run", "numbers are those of the others minus the first, or over it"
    verdict, differences = workload["verdict"]["good"], workload["differences"]["good"]
    assert verdict["better"] == dict.fromkeys("1234", "good")
    for depth in "1234":
        lengths = [workload["drafters"][n]["by_depth"][depth]["acceptance_length"][0] for n in ("run", "good")]
        value, low, high = differences[depth]["difference"]
        assert value == pytest.approx(lengths[1] - lengths[0])
        assert 0 < low < value < high
    assert "tokens_per_second" not in workload


# ---------------------------------------------------------------- what can be compared


def test_another_comparison_of_the_same_name_is_not_written_over(trained, another, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    b, c = another("b", 1), another("c", 2)
    words, others = [f"x:{trained.folder}", f"y:{b.folder}"], [f"x:{trained.folder}", f"y:{c.folder}"]
    call(*words, *SHORT, default=None)
    file = tmp_path / "runs" / "compare" / "x-y" / "result.json"
    before = file.read_bytes()
    code, line = call(*others, *SHORT, default=None)
    assert (code, file.read_bytes()) == (2, before)
    assert f"runs/compare/x-y compares x:{trained.folder} y:{b.folder}: give another compare.out=…" in line
    call(*others, *SHORT, "overwrite=true", default=None)
    assert json.loads(file.read_text())["trainings"]["y"] == [str(c.folder)]


def test_a_published_draft_may_have_been_trained_on_the_prompts(trained, another, call):
    one = another("theirs", 5)
    export.export(one.config("target.aux_layers=[1,2,4]", *SHAPE))
    result = call(trained.folder, f"theirs:{one.folder / 'export'}", *SHORT)
    assert "theirs may have been trained on these prompts" in result["workloads"][0]["notes"]


# ---------------------------------------------------------------- what is refused


def test_other_data(trained, another, call, prompts):
    b = another("b")
    for folder, name in ((b.folder / "train", "inputs"), (b.folder / "data", None)):
        manifest = artifacts.read_json(folder / "manifest.json", "the test")
        where = manifest[name] if name else manifest
        where["data" if name else "dataset_fingerprint"] = "b" * 16
        artifacts.write_json(folder / "manifest.json", manifest)
    code, line = call(trained.folder, b.folder)
    assert code == 2
    assert re.search(r"b was trained on other data than .*run/data, .*: give prompts that nothing was trained on", line)
    (workload,) = call(trained.folder, b.folder, prompts, "evaluate.num_prompts=1")["workloads"]
    assert "b may have been trained on these prompts" in workload["notes"]
