"""What `compare` refuses, what it takes for another comparison, and what it hands on to vLLM."""

import json
import re
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle31_train import artifacts, compare, export, vocab
from eagle31_train.measure import drafters
from eagle31_train.measure.serving import Engine
from eagle31_train.schema import UserError
from eagle31_train.store.sealed import seal
from tests.measure.conftest import SHAPE

pytestmark = pytest.mark.usefixtures("no_page")


def test_fewer_than_two(trained, call):
    for words in ([], [trained.folder]):
        assert call(*words) == (2, f"error: {compare.FEWER}")


def test_equal_names(trained, call):
    code, line = call(f"a:{trained.folder}", f"a:{trained.folder}")
    assert (code, line[:36]) == (2, "error: two drafters are called a: te")
    code, line = call(trained.folder, trained.folder)
    assert "two drafters are called" in line
    code, line = call(f"plain:{trained.folder}", f"a:{trained.folder}")
    assert "plain is what decoding without a drafter is called" in line


def test_another_comparison_of_the_same_name_is_not_written_over(trained, another, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    b, c = another("b", 1), another("c", 2)
    options = ("evaluate.max_new_tokens=4", "evaluate.depths=3")
    words, others = [f"x:{trained.folder}", f"y:{b.folder}"], [f"x:{trained.folder}", f"y:{c.folder}"]
    call(*words, *options, default=None)
    file = tmp_path / "runs" / "compare" / "x-y" / "result.json"
    before = file.read_bytes()
    code, line = call(*others, *options, default=None)
    assert code == 2
    there = f"x:{trained.folder} y:{b.folder}"
    assert line == (
        f"error: runs/compare/x-y compares {there}: give another compare.out=…, or replace it with overwrite=true"
    )
    assert file.read_bytes() == before
    call(*words, *options, "evaluate.depths=4", default=None)
    call(*others, *options, "compare.out=elsewhere", default=None)
    assert json.loads(file.read_text())["trainings"]["y"] == [str(b.folder)]
    call(*others, *options, "overwrite=true", default=None)
    assert json.loads(file.read_text())["trainings"]["y"] == [str(c.folder)]


def test_a_training_that_replaced_something_does_not_let_its_comparisons_do_so(trained, another, call):
    other, file = another("b", 1), trained.folder / "train" / "config.yaml"
    saved = file.read_text()
    assert "overwrite: false" in saved
    file.write_text(saved.replace("overwrite: false", "overwrite: true"))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "compare", lambda _named, config: seen.append(config.overwrite))
        for more in ([], ["overwrite=true"]):
            compare.main([str(trained.folder), str(other.folder), *more])
    file.write_text(saved)
    assert seen == [False, True]


def test_training_again_makes_a_comparison_one_of_others(trained, another, call):
    b = another("b")
    before = call(trained.folder, b.folder)["identities"]
    assert before == {"run": [identity_of(trained)], "b": [identity_of(b)]}
    weights = load_file(b.weights)
    save_file({**weights, "norm.weight": weights["norm.weight"] + 1}, b.weights)
    b.finish_training()
    after = call(trained.folder, b.folder)["identities"]
    assert after["run"] == before["run"]
    assert after["b"] == [identity_of(b)] != before["b"]


def identity_of(run):
    return drafters.identity(artifacts.read_json(run.folder / "train" / "manifest.json", ""))


def test_a_training_that_is_named_twice_or_not_at_all(trained, another, call):
    b = another("b")
    for some in (f"{trained.folder},{trained.folder}/", f"{trained.folder},"):
        code, line = call(f"a:{some}", f"b:{b.folder}")
        assert code == 2
        assert line.startswith(f"error: a is {trained.folder},")
        assert line.endswith("names a training twice or not at all: give each once")


def test_other_data(trained, another, call, tmp_path):
    b = another("b")
    for folder, name in ((b.folder / "train", "inputs"), (b.folder / "data", None)):
        manifest = artifacts.read_json(folder / "manifest.json", "the test")
        where = manifest[name] if name else manifest
        where["data" if name else "dataset_fingerprint"] = "b" * 16
        artifacts.write_json(folder / "manifest.json", manifest)
    code, line = call(trained.folder, b.folder)
    assert code == 2
    assert re.search(r"b was trained on other data than .*run/data, .*: give prompts that nobody learnt", line)
    file = tmp_path / "some.jsonl"
    file.write_text(json.dumps({"id": "q0", "source": "a", "prompt": "hello world"}))
    (workload,) = call(trained.folder, b.folder, f"evaluate.prompts={file}")["workloads"]
    assert workload["prompts"] == 1
    assert "nobody knows whether b was trained on these prompts" in workload["notes"]


def test_another_target(trained, another, call):
    b = another("b")
    (b.folder / "store").mkdir()
    learnt = {"name": "some/target", "revision": None, "weights": "0" * 16, "dtype": "bfloat16"}
    manifest = {"fingerprint": "f" * 16, "inputs": {"target": learnt}}
    (b.folder / "store" / "manifest.json").write_bytes(seal(manifest))
    code, line = call(trained.folder, b.folder)
    assert code == 2
    assert f"{b.folder}: the drafter was trained for some/target, which had other weights" in line
    code, line = call(trained.folder, another("c", target_hidden_size=16).folder)
    assert "was made for a target of hidden size 16, 50 tokens and at least 4 layers" in line


def test_a_run_that_is_not_whole(trained, another, call):
    b, c, d = another("b"), another("c"), another("d")
    (b.folder / "data" / "vocab.safetensors").unlink()
    assert call(trained.folder, b.folder)[1].startswith(f"error: {b.folder}/data/vocab.safetensors")
    spare = vocab.DraftVocab(torch.arange(20).numpy(), 50)
    vocab.write(b.folder / "data" / "vocab.safetensors", spare)
    assert "is not the vocabulary that the drafter was trained with" in call(trained.folder, b.folder)[1]
    (c.folder / "train" / "manifest.json").unlink()
    assert f"{c.folder}/train is not finished: run" in call(trained.folder, c.folder)[1]
    (d.folder / "data" / "dataset" / "dataset_dict.json").write_text("{}")
    assert "dataset_dict.json has 2 bytes" in call(d.folder, trained.folder)[1]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("evalute.depths=3", "did you mean 'evaluate.depths'?"),
        ("+suite=[mt_bench,gsm8q]", "no configs/suite/gsm8q.yaml: did you mean 'gsm8k'?"),
        ("evaluate.depths=2", "evaluate.depths=2 leaves out evaluate.draft_tokens=3"),
        ("compare.verified=-1", "compare.verified=-1 is no number of prompts"),
        ("evaluate.perturbations=[no_templat]", "did you mean 'no_template'?"),
    ],
)
def test_options_that_do_not_exist_or_measure_nothing(trained, another, call, option, words):
    code, line = call(f"a:{trained.folder}", f"b:{trained.folder}", option, default=False)
    assert code == 2
    assert words in line


def test_a_name_that_is_nothing(trained, call):
    code, line = call(trained.folder, "nowhere")
    assert code == 2
    assert "nowhere" in line


def test_what_vllm_cannot_serve_is_told_before_anything_is_measured(trained, another, call, monkeypatch):
    monkeypatch.setattr(compare, "load_model", None)
    monkeypatch.setattr(compare, "check_serving", lambda _: Engine("0.0", "8 × GPU"))
    b = another("b")
    code, line = call(trained.folder, b.folder, "evaluate.backend=vllm")
    assert code == 2
    assert f"{trained.folder}/export.json is missing: run `python -m eagle31_train.export` first" in line
    for run in (trained, b):
        export.export(run.config("target.aux_layers=[1,2,4]", *SHAPE))
    words = (trained.folder, b.folder, "evaluate.backend=vllm")
    file = b.folder / "train" / "manifest.json"
    manifest = artifacts.read_json(file, "")
    artifacts.write_json(file, {**manifest, "fingerprint": "0" * 16})
    assert f"{b.folder}/export has other weights than {b.folder}/train: run" in call(*words)[1]
    weights = load_file(b.weights)
    save_file({**weights, "norm.weight": weights["norm.weight"] + 1}, b.weights)
    b.finish_training()  # from the same inputs
    assert f"{b.folder}/export has other weights than {b.folder}/train: run" in call(*words)[1]
    (trained.folder / "export" / "config.json").write_text("{}")
    assert "config.json has 2 bytes" in call(*words)[1]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("evaluate.concurrency=[0]", "evaluate.concurrency=[0] measures nothing"),
        ("evaluate.vllm_args.model=x", "evaluate.vllm_args.model cannot be set: it is target.path"),
        ("evaluate.vllm_python=/no/python", "evaluate.vllm_python=/no/python cannot be run"),
    ],
)
def test_how_vllm_is_to_be_run_is_looked_at_first(trained, call, monkeypatch, option, words):
    for later in ("exported", "read_data", "load_model"):
        monkeypatch.setattr(compare, later, None)
    code, line = call(trained.folder, f"b:{trained.folder}", "evaluate.backend=vllm", option)
    assert code == 2
    assert words in line


def test_what_cannot_be_measured_is_told_before_the_target_is_loaded(trained, another, call, monkeypatch):
    monkeypatch.setattr(compare, "load_model", None)
    short = another("short", max_position_embeddings=20)
    assert "none of 4 prompts has at most" in call(trained.folder, short.folder)[1]


def test_vllm_starts_with_the_result_written_and_the_memory_free(trained, another, call, out, monkeypatch):
    """It may fail after hours, and wants a GPU to itself. And result.json, which lists the pictures, is the last."""
    b, file, loaded, seen, broken = another("b"), out / "result.json", [], [], [True]

    def load(*given):
        model = load_model(*given)
        loaded.append(weakref.ref(model))
        return model

    def write(folder, result):
        seen.append(f"page, {told(file)} there")
        picture = folder / "picture.png"
        folder.mkdir(exist_ok=True)
        picture.write_text("serving" if "serving" in result else "alone")
        return [picture]

    def told(file):
        return "nothing" if not file.is_file() else "serving" if "serving" in json.loads(file.read_text()) else "alone"

    def measured(*_):
        assert loaded.pop()() is None, "the target is still in memory"
        seen.append(f"vLLM, {told(file)} there")
        assert artifacts.first_damaged(out, json.loads(file.read_text())["files"]) is None
        if broken:
            raise UserError("vLLM broke off")
        return {"rows": [], "verdict": [], "notes": [], "definitions": ""}

    load_model = compare.load_model
    monkeypatch.setattr(compare, "load_model", load)
    monkeypatch.setattr(compare.page, "write", write)
    monkeypatch.setattr(compare.torch.cuda, "empty_cache", lambda: seen.append("free"))
    monkeypatch.setattr(compare, "check_serving", lambda _: Engine("0.0", "8 × GPU"))
    monkeypatch.setattr(compare, "measure_serving", measured)
    for run in (trained, b):
        export.export(run.config("target.aux_layers=[1,2,4]", *SHAPE))
    words = (trained.folder, b.folder, "evaluate.backend=vllm")
    assert call(*words) == (2, "error: vLLM broke off")
    assert seen == ["page, nothing there", "free", "vLLM, alone there"]
    broken.clear()
    result = call(*words)
    assert seen[3:] == ["page, alone there", "free", "vLLM, alone there", "page, alone there"]
    assert result["files"].keys() == {"picture.png"}
    assert artifacts.first_damaged(out, result["files"]) is None


def test_what_vllm_says_is_told_here_too(trained, another, call, monkeypatch, capsys):
    asked = []

    def measured(config, drafts, prompts, end_ids, engine, folder):
        asked.append((drafts, [len(prompt.ids) for prompt in prompts]))
        told = {"rows": [], "verdict": ["serve without it"], "notes": ["not all went well"], "definitions": "TTFT: …"}
        return {**told, "machine": engine.device}

    monkeypatch.setattr(compare, "check_serving", lambda _: Engine("0.0", "8 × GPU"))
    monkeypatch.setattr(compare, "measure_serving", measured)
    b, c = another("b"), another("c", seed=1)
    for run in (trained, b):
        export.export(run.config("target.aux_layers=[1,2,4]", *SHAPE))
    words = (trained.folder, f"many:{b.folder},{c.folder}", "evaluate.backend=vllm")
    result = call(*words)
    assert asked == [({"run": trained.folder / "export", "many": b.folder / "export"}, [5, 5, 5])]
    assert result["workloads"][0]["prompts"] == 3
    assert result["serving"]["workload"] == "heldout"
    assert result["serving"]["machine"] == "8 × GPU"
    assert "serve without it\nof many, the first of 2 trainings\nnot all went well" in capsys.readouterr().out
    short = "evaluate.vllm_args.max_model_len=28"  # 4 of which are left beside an answer of 12 and 2 × (5 + 1)
    assert "none of 4 prompts has at most 4 tokens" in call(*words, short, "evaluate.serve_depths=[5]")[1]
    assert call(*words, short, "evaluate.serve_depths=[4]", "evaluate.draft_tokens=3")["workloads"][0]["prompts"] == 3


def test_help_tells_the_drafters_and_the_options(capsys):
    with pytest.raises(SystemExit) as stopped:
        compare.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "NAME:…" in text
    assert "compare.verified" in text
