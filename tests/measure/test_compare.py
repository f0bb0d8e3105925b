"""Drafters side by side, as a user calls it: what can be compared, and who wins."""

import json

import pytest
from omegaconf import OmegaConf

from eagle31_train import cli, compare, export
from eagle31_train.cli import load_config
from eagle31_train.measure import measuring
from eagle31_train.schema import UserError
from tests.measure.conftest import SHAPE

pytestmark = pytest.mark.usefixtures("no_page")

PROMPTS = [{"id": f"q{i}", "source": "ab"[i % 2], "prompt": f"hello {'again ' * i}world"} for i in range(12)]


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


def test_a_folder_that_looks_like_an_option_is_a_drafter(tmp_path, monkeypatch):
    (tmp_path / "runs" / "lr=1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    words = ["runs/lr=1", "a:runs/lr=1,runs/lr=2", "runs/lr=2", "seed=1", "evaluate.num_prompts=3", "b"]
    assert [word for word in words if compare.is_drafter(word)] == ["runs/lr=1", "a:runs/lr=1,runs/lr=2", "b"]


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
    assert len(list((out / "workloads").iterdir())) == 4, "each is measured once, whatever it is called"
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
