"""Drafters side by side, as a user calls it: what can be compared, which is better, and what vLLM is handed."""

import json
import re
import weakref

import pytest
from omegaconf import OmegaConf
from sample_results import serving

from eagle31_train import artifacts, compare, export
from eagle31_train.evaluation import comparison, evaluating
from eagle31_train.evaluation.serving import Engine
from tests.evaluation.conftest import SHAPE

pytestmark = pytest.mark.usefixtures("no_page")

PROMPTS = [{"id": f"q{i}", "source": "ab"[i % 2], "prompt": f"hello {'again ' * i}world"} for i in range(12)]
SHORT = ("evaluate.max_new_tokens=4", "evaluate.max_speculative_tokens=3")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in PROMPTS))
    return f"evaluate.prompts={file}"


def test_drafters_have_names():
    words = ["p/x/a", "q/x/a", "b/", "new:y/a,y/b"]
    expected = {"p/x/a": ["p/x/a"], "q/x/a": ["q/x/a"], "b": ["b"], "new": ["y/a", "y/b"]}
    assert list(comparison.named(words).items()) == list(expected.items()), "others are compared with the first"


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


def test_options_are_those_of_the_first_where_it_lies_now(trained, another, tmp_path, monkeypatch):
    """Its configuration names the folder that it was trained in, and what training might replace."""
    configs = []
    monkeypatch.setattr(compare, "compare", lambda _named, config: configs.append(config))
    a, b = another("a"), another("b")
    moved = tmp_path / "it's moved"
    a.folder.rename(moved)
    saved = OmegaConf.load(moved / "train" / "config.yaml")
    saved.run_dir, saved.evaluate.num_prompts, saved.overwrite = "runs/long ago", 2, True
    OmegaConf.save(saved, moved / "train" / "config.yaml")
    for words in (
        [moved, b.folder],
        [b.folder, moved],
        [moved, b.folder, "+experiment=smollm2", f"run_dir={b.folder}"],
    ):
        compare.main([*map(str, words)])
    assert [config.run_dir for config in configs] == [str(moved), str(b.folder), str(b.folder)]
    assert [config.evaluate.num_prompts for config in configs] == [2, 20, 20]
    assert not any(config.overwrite for config in configs)


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


# ---------------------------------------------------------------- served by vLLM


def test_vllm_starts_with_the_result_written_and_the_memory_free(trained, another, call, out, monkeypatch):
    """It may fail after hours, and wants a GPU to itself."""
    b, c, file, loaded, seen = another("b"), another("c", seed=1), out / "result.json", [], []

    def load(*given):
        model = load_model(*given)
        loaded.append(weakref.ref(model))
        return model

    def measured(config, drafts, prompts, end_ids, engine, folder):
        assert loaded.pop()() is None, "the target is still in memory"
        assert seen == ["free"]
        assert "serving" not in json.loads(file.read_text())
        assert drafts == {"run": trained.folder / "export", "many": b.folder / "export"}
        assert [len(prompt.ids) for prompt in prompts] == [5, 5, 5]
        return serving()

    load_model = evaluating.load_model
    monkeypatch.setattr(evaluating, "load_model", load)
    monkeypatch.setattr(compare.torch.cuda, "empty_cache", lambda: seen.append("free"))
    monkeypatch.setattr(compare, "check_serving", lambda _: Engine("0.0", "8 × GPU"))
    monkeypatch.setattr(compare, "measure_serving", measured)
    for run in (trained, b):
        export.export(run.config("target.aux_layers=[1,2,4]", *SHAPE))
    words = (trained.folder, f"many:{b.folder},{c.folder}", "evaluate.backend=vllm")
    result = call(*words, "evaluate.vllm_args.max_model_len=30")["serving"]
    assert (result["workload"], result["notes"][0]) == ("heldout", "of many, the first of 2 trainings")
    # 4 tokens are left beside an answer of 12 and 2 × (5 + 1).
    assert "none of 4 prompts has at most 4 tokens" in call(*words, "evaluate.vllm_args.max_model_len=28")[1]
