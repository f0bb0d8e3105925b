"""Drafters side by side, as a user calls it: what can be compared, what is refused, and who wins."""

import json
import re

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from eagle31_train import artifacts, cli, compare, export, vocab
from eagle31_train.cli import load_config
from eagle31_train.measure import drafters, measuring
from eagle31_train.schema import UserError
from eagle31_train.store.sealed import seal

PROMPTS = [{"id": f"q{i}", "source": "ab"[i % 2], "prompt": f"hello {'again ' * i}world"} for i in range(12)]


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    """Pages and their pictures have tests of their own."""
    monkeypatch.setattr(compare.page, "write", lambda folder, result: [])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "compared"


@pytest.fixture
def call(out, capsys):
    """A function that compares and gives the result, or else the status and the one line of the error."""

    def called(*words, default=True):
        options = [f"compare.out={out}", "evaluate.max_new_tokens=12", "evaluate.depths=4"] if default else []
        try:
            compare.main([*map(str, words), *options])
        except SystemExit as stopped:
            error = capsys.readouterr().err
            lines = [line for line in error.splitlines() if line.startswith("error: ")]
            assert len(lines) == 1, error
            return stopped.code, lines[0]
        return json.loads((out / "result.json").read_text()) if default else {}

    return called


# ---------------------------------------------------------------- what the words mean


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["runs/a", "runs/b/"], {"a": ["runs/a"], "b": ["runs/b"]}),
        (["x/a", "y/a", "b"], {"x/a": ["x/a"], "y/a": ["y/a"], "b": ["b"]}),
        (["/home/me/x/a", "/home/me/y/a", "b"], {"x/a": ["/home/me/x/a"], "y/a": ["/home/me/y/a"], "b": ["b"]}),
        (["p/x/a", "q/x/a", "p/y/a"], {"p/x/a": ["p/x/a"], "q/x/a": ["q/x/a"], "y/a": ["p/y/a"]}),
        (["old:x/a,x/b/", "new:y/a,y/b"], {"old": ["x/a", "x/b"], "new": ["y/a", "y/b"]}),
        (["org/draft", "ours:runs/a"], {"draft": ["org/draft"], "ours": ["runs/a"]}),
        (["3.0 (five steps):a", "b"], {"3.0 (five steps)": ["a"], "b": ["b"]}),
    ],
)
def test_drafters_have_names(words, named):
    assert compare.called(words) == named
    assert list(compare.called(words)) == list(named), "the first is what others are compared with"


def test_the_title_says_which_way_the_numbers_are():
    """They are the others minus the first, or over it."""
    assert compare.title(["3.0", "3.1"]) == "3.1 against 3.0"
    assert compare.title(["3.0", "3.1", "fc"]) == "3.1, fc against 3.0"


def test_the_folder_that_one_stands_in_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert compare.called([".", "../b"]) == {"mine": ["."], "b": ["../b"]}


# ---------------------------------------------------------------- who wins


def test_a_drafter_that_is_better_is_called_so(trained, another, call, monkeypatch, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in PROMPTS))
    monkeypatch.setattr("tests.measure.conftest.HELDOUT", [[2, 5, *[7] * i, 6, 3] for i in range(12)])
    good = another("good", good=True)
    result = call(trained.folder, good.folder, f"evaluate.prompts={file}", "compare.verified=12")
    (workload,) = result["workloads"]
    assert (workload["name"], workload["prompts"]) == ("prompts", 12)
    lengths = {
        name: [numbers["by_depth"][depth]["acceptance_length"][0] for depth in "1234"]
        for name, numbers in workload["drafters"].items()
    }
    verdict, differences = workload["verdict"]["good"], workload["differences"]["good"]
    assert verdict["better"] == dict.fromkeys("1234", "good")
    assert verdict["text"].startswith("good wins at every number of draft tokens, +")
    for at, depth in enumerate("1234"):
        value, low, high = differences[depth]["difference"]
        assert value == pytest.approx(lengths["good"][at] - lengths["run"][at])
        assert 0 < low < value < high
        assert differences[depth]["ratio"][0] == pytest.approx(lengths["good"][at] / lengths["run"][at])
    assert workload["verified"] == 12
    assert "tokens_per_second" not in workload

    back = call(good.folder, trained.folder, f"evaluate.prompts={file}", "compare.verified=12")["workloads"][0]
    assert back["verdict"]["run"]["text"].startswith("good wins at every number of draft tokens, +")
    assert back["differences"]["run"]["3"]["difference"][0] == -differences["3"]["difference"][0]


def test_a_drafter_is_no_better_than_itself(trained, another, call):
    copy = another("copy")
    result = call(trained.folder, copy.folder, "evaluate.perturbations=[temperature_0.7]", "evaluate.drift=false")
    assert [workload["name"] for workload in result["workloads"]] == ["heldout", "heldout · temperature_0.7"]
    for workload in result["workloads"]:
        for found in workload["differences"]["copy"].values():
            assert found["difference"] == [0.0, 0.0, 0.0]
            assert found["ratio"] == [1.0, 1.0, 1.0]
        assert set(workload["verdict"]["copy"]["better"].values()) == {None}
        assert "no difference shown" in workload["verdict"]["copy"]["text"]
        ours, theirs = workload["drafters"].values()
        assert ours == theirs


def test_drawn_drafts_are_counted_of_every_prompt(trained, another, call):
    words = (trained.folder, another("other", seed=1).folder)
    options = ("evaluate.temperature=0.8", "evaluate.draft_sampling=probabilistic", "compare.verified=1")
    (workload,) = call(*words, *options)["workloads"]
    for numbers in workload["drafters"].values():
        assert numbers["prompts"] == 3
        assert numbers["drift"] is None
        for depth in "1234":
            assert numbers["by_depth"][depth]["drafts"] >= 3 * 11 / (int(depth) + 1)


# ---------------------------------------------------------------- what can be compared


def test_several_trainings_are_one_drafter(trained, another, call, out, monkeypatch):
    b, c, d = (another(f"t{seed}", seed) for seed in (1, 2, 3))
    result = call(f"old:{trained.folder},{b.folder}", f"new:{c.folder},{d.folder}")
    (workload,) = result["workloads"]
    assert result["drafters"] == ["old", "new"]
    assert not any("seed" in note for note in workload["notes"])
    assert result["trainings"] == {
        "old": [str(trained.folder), str(b.folder)],
        "new": [str(c.folder), str(d.folder)],
    }
    assert workload["prompts"] == workload["drafters"]["old"]["prompts"] == 3
    by_training = workload["drafters"]["old"]["by_training"]
    alone = call(f"old:{trained.folder}", f"new:{b.folder}")["workloads"][0]["drafters"]
    assert by_training[0]["3"] == alone["old"]["by_depth"]["3"]["acceptance_length"][0]
    assert by_training[1]["3"] == alone["new"]["by_depth"]["3"]["acceptance_length"][0]
    assert len(list((out / "workloads").iterdir())) == 5, "old/0 is measured once"
    monkeypatch.setattr(measuring.Measurer, "measure", None)
    again = call(f"old:{trained.folder},{b.folder}", f"new:{c.folder},{d.folder}")
    assert again == result


def test_a_drafter_that_is_added_is_measured_alone(trained, another, call, tmp_path, monkeypatch):
    asked, measure = [], measuring.Measurer.measure

    def telling(self, workload, candidates, verified=None):
        asked.append([candidate.name for candidate in candidates])
        return measure(self, workload, candidates, verified)

    monkeypatch.setattr(measuring.Measurer, "measure", telling)
    monkeypatch.chdir(tmp_path)
    options = ("evaluate.max_new_tokens=4", "evaluate.depths=3")
    words = [f"a:{trained.folder}", f"b:{another('b', 1).folder}"]
    call(*words, *options, default=None)
    call(*words, f"c:{another('c', 2).folder}", *options, default=None)
    assert asked == [["a/0", "b/0"], ["c/0"]]
    assert {"a-b", "a-b-c"} < {path.name for path in (tmp_path / "runs" / "compare").iterdir()}


def test_options_are_those_of_the_first_where_it_lies_now(trained, another, call, tmp_path):
    """Its configuration names the folder that it was trained in."""
    a, b = another("a"), another("b")
    moved = tmp_path / "it's moved"
    a.folder.rename(moved)
    file = moved / "train" / "config.yaml"
    saved = OmegaConf.load(file)
    saved.run_dir, saved.evaluate.num_prompts = "runs/long ago", 2
    OmegaConf.save(saved, file)
    assert call(moved, b.folder)["workloads"][0]["prompts"] == 2
    assert call(b.folder, moved)["workloads"][0]["prompts"] == 3
    assert call(moved, b.folder, "evaluate.num_prompts=1")["workloads"][0]["prompts"] == 1
    recipe = ("+experiment=smollm2", f"run_dir={b.folder}", f"target.path={b.target}", "target.device=cpu")
    assert call(moved, b.folder, *recipe)["workloads"][0]["prompts"] == 3


def test_drafters_of_other_layers_heads_and_recipes(trained, another, call):
    shallow = another("shallow", aux_layers=[1], fc_norm=False, norm_output=False)
    wide = another("wide", num_attention_heads=8, num_key_value_heads=4, draft_vocab_size=20)
    result = call(trained.folder, shallow.folder, wide.folder)
    assert result["drafters"] == ["run", "shallow", "wide"]
    assert result["workloads"][0]["verdict"].keys() == {"shallow", "wide"}


def test_suites_and_perturbations_go_on_top_of_what_a_run_keeps(trained, another, call, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(json.dumps({"question_id": row["id"], "turns": [row["prompt"]]}) for row in PROMPTS))
    given = ["+suite=[mt_bench,gsm8k]", *(f"evaluate.suites.{name}.path={file}" for name in ("mt_bench", "gsm8k"))]
    options = ("evaluate.perturbations=[system_absent]", f"evaluate.suites.own={{path:{file}}}")
    words = (trained.folder, another("b", 1).folder, "evaluate.num_prompts=2")
    result = call(*words, *given, *options, f"evaluate.prompts={file}")
    names = ["prompts", "mt_bench", "gsm8k", "own"]
    assert [w["name"] for w in result["workloads"] if w["perturbation"] is None] == names
    assert [w["name"] for w in result["workloads"] if w["perturbation"]] == [
        f"{name} · system_absent" for name in names
    ]
    notes = next(w["notes"] for w in result["workloads"] if w["name"] == "prompts · system_absent")
    assert "no system turn, not even the template's own" in notes


def test_a_published_draft_is_compared_and_nobody_knows_what_it_learnt(trained, another, call, published):
    result = call(trained.folder, f"theirs:{published}", "evaluate.perturbations=[temperature_0.7]")
    for workload in result["workloads"]:
        assert "nobody knows whether theirs was trained on these prompts" in workload["notes"]
    assert len(result["workloads"]) == 2
    first = call(f"theirs:{published}", trained.folder)
    assert list(first["drafters"]) == ["theirs", trained.folder.name]
    assert first["workloads"][0]["prompts"] == result["workloads"][0]["prompts"]
    code, line = call(published, f"again:{published}")
    assert code == 2
    assert line.endswith("config.yaml is missing: give a run's folder, or a recipe with +experiment=NAME")


@pytest.fixture
def published(another):
    """The drafter of `another` as the exporter writes it."""
    one = another("theirs", 5)
    export.export(one.config("target.aux_layers=[1,2,4]", *SHAPE))
    return one.folder / "export"


SHAPE = [
    f"drafter.{option}"
    for option in (
        "num_attention_heads=4",
        "num_key_value_heads=2",
        "head_dim=4",
        "intermediate_size=24",
        "rope_theta=100.0",
        "max_position_embeddings=128",
    )
]


# ---------------------------------------------------------------- what is refused


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
    file.write_text(json.dumps(PROMPTS[0]))
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


def test_what_vllm_says_is_told_here_too(trained, another, call, monkeypatch, capsys):
    asked = []

    def measured(config, drafts, prompts, end_ids):
        asked.append((drafts, [len(prompt.ids) for prompt in prompts]))
        return {"rows": [], "verdict": ["serve without it"], "notes": ["not all went well"], "definitions": "TTFT: …"}

    monkeypatch.setattr(compare, "measure_serving", measured)
    b, c = another("b"), another("c", seed=1)
    for run in (trained, b):
        export.export(run.config("target.aux_layers=[1,2,4]", *SHAPE))
    words = (trained.folder, f"many:{b.folder},{c.folder}", "evaluate.backend=vllm")
    result = call(*words)
    assert asked == [({"run": trained.folder / "export", "many": b.folder / "export"}, [5, 5, 5])]
    assert result["workloads"][0]["prompts"] == 3
    assert result["serving"]["workload"] == "heldout"
    assert "threads" not in result["serving"]["machine"], "those of this process are not vLLM's"
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


# ---------------------------------------------------------------- a saved configuration


def test_a_saved_configuration_is_a_beginning(trained, tmp_path):
    file = trained.folder / "train" / "config.yaml"
    assert load_config([], file) == trained.config()
    changed = load_config(["evaluate.depths=5", "+suite=[mt_bench,aime]", "evaluate.suites.aime=null"], file)
    assert changed.evaluate.depths == 5
    assert changed.evaluate.suites["mt_bench"]["prompt"] == "prompt"
    assert changed.evaluate.suites["aime"] is None
    older = OmegaConf.load(file)
    del older.evaluate.depths, older.compare
    OmegaConf.save(older, tmp_path / "older.yaml")
    assert load_config([], tmp_path / "older.yaml").evaluate.depths == cli.Config().evaluate.depths
    with pytest.raises(UserError, match=r"missing.yaml is missing: give a run's folder, or a recipe"):
        load_config([], tmp_path / "missing.yaml")
    (tmp_path / "bad.yaml").write_text("evaluate: {depths: [")
    with pytest.raises(UserError, match="a configuration file is not YAML"):
        load_config([], tmp_path / "bad.yaml")
