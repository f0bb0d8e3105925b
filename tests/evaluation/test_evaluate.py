"""Stage 4 and comparisons: what they read and report, when a result is up to date, which drafter is better, and what is
refused."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from families import write_rows
from made import message_of
from pipeline import write_store
from planting import replaced, watched
from safetensors.torch import load_file, save_file

from eagle31_train import compare, evaluate, export
from eagle31_train.checkpoint.drafter_checkpoint import PADDING, DrafterCheckpoint
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.evaluation import in_process, measurer
from eagle31_train.model import vocab
from eagle31_train.model.drafter import Drafter
from eagle31_train.targets.cached import CachedTarget


@pytest.fixture
def call(tmp_path, capsys):
    """A function that compares and gives the result, or else the status and the one line of the error."""
    out = tmp_path / "compared"

    def called(*words, default=True):
        options = [f"compare.out={out}", "overwrite=true"] if default else []
        try:
            compare.main([*map(str, words), *options, "evaluate.max_new_tokens=4", "evaluate.max_speculative_tokens=4"])
        except SystemExit as stopped:
            error = capsys.readouterr().err
            lines = [line for line in error.splitlines() if line.startswith("error: ")]
            assert len(lines) == 1, error
            return stopped.code, lines[0]
        return json.loads((out / "result.json").read_text()) if default else {}

    return called


FEW = ["evaluate.num_prompts=2", "evaluate.max_new_tokens=4", "evaluate.max_speculative_tokens=3",
       "evaluate.warmup=false"]  # fmt: skip


def test_report(run, capsys):
    evaluate.evaluate(run.config())
    manifest = run.manifest
    (numbers,) = manifest["result"]["workloads"][0]["drafters"].values()
    counts = numbers["by_depth"]["3"]
    assert [p["id"] for p in manifest["per_prompt"]] == [f"heldout-{i}" for i in range(4)]
    accepted = [count for p in manifest["per_prompt"] for count in p["accepted"]]
    assert counts["drafts"] == len(accepted)
    assert counts["accepted_per_position"] == [sum(count > position for count in accepted) for position in range(3)]
    assert counts["acceptance_length"][0] < 1.3  # it was never trained
    assert (manifest["identical"], manifest["not_measured"], manifest["left_out"]) == (True, [], {"heldout": {}})
    assert manifest["inputs"]["train"] == "e" * 16
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  3   "))
    assert f"{counts['acceptance_length'][0]:.3f}" in row


def test_weights_are_rounded_as_the_exporter_rounds_them(run, model):
    config = run.config("target.dtype=bfloat16")
    target = CachedTarget(model, [1, 2, 4])
    drafter = in_process.load(DrafterCheckpoint.of_run(run.folder, config.data_folder), "it", target, config).drafter
    trained = load_file(run.weights)
    exported = {name: tensor.bfloat16() for name, tensor in trained.items()}
    for name, parameter in drafter.state_dict().items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, exported[name].float()), name
    assert not torch.equal(trained["fc.weight"], exported["fc.weight"].float())
    exact = Drafter(drafter.shape, target.embedding.weight).midlayer.self_attn.rope.inv_freq
    assert torch.equal(drafter.midlayer.self_attn.rope.inv_freq, exact), "RoPE is not rounded with the weights"
    assert drafter.shared_embedding.data_ptr() == target.embedding.weight.data_ptr()
    assert "shared_embedding" not in drafter.state_dict()


def test_rows_that_pad_the_targets_embedding_are_nobodys(run, model):
    """Of a drafter with an embedding of its own, which is as long as the vocabulary. Many more are other tokens."""
    target, checkpoint = CachedTarget(model, [1, 2, 4]), DrafterCheckpoint.of_run(run.folder, run.folder / "data")
    rows = target.embedding.weight.data
    tensors = {**checkpoint.tensors, "embed_tokens.weight": rows.clone()}
    own = replace(checkpoint, shape=replace(checkpoint.shape, share_embedding=False), _mapped=tensors)
    target.embedding.weight.data = torch.cat([rows, torch.full_like(rows[:3], torch.nan)])
    try:
        for one in (checkpoint, own):
            drafter = one.load(target, torch.float32, torch.float32)
            assert drafter.embed(torch.arange(len(rows))).equal(rows)
        target.embedding.weight.data = rows.new_zeros(len(rows) + PADDING + 1, rows.shape[1])
        said = message_of(own.load, target, torch.float32, torch.float32)
        assert "made for a target with hidden size 32, 50 tokens and at least 4 layers, not 32, 1075" in said
    finally:
        target.embedding.weight.data = rows


def test_outputs_are_not_called_equal_where_one_does_not_count_as_verified(run, monkeypatch):
    """As where a tie changed it: test_measurer.py."""

    @replaced(monkeypatch, measurer.Measurer, "measure")
    def tied(right, *arguments):
        found = right(*arguments)
        for measurement in found.values():
            measurement.counts[0].seen.clear()
        return found

    evaluate.evaluate(run.config(*FEW))
    (workload,) = run.manifest["result"]["workloads"]
    assert (run.manifest["identical"], workload["verified"], workload["prompts"]) == (False, 1, 2)


def test_what_makes_an_evaluation_out_of_date(run, capsys, monkeypatch):
    measured = watched(monkeypatch, measurer.Measurer, "measure")
    evaluate.evaluate(run.config(*FEW, "seed=1"))
    for same in ("evaluate.warmup=true", "evaluate.concurrency=[2]", "evaluate.vllm_python=elsewhere", "seed=2"):
        evaluate.evaluate(run.config(*FEW, same))
        assert "up to date" in capsys.readouterr().out, same
    with pytest.raises(UserError, match=r"workloads\.perturbations: \[\] there, \['no_template'\] here"):
        evaluate.evaluate(run.config(*FEW, "evaluate.perturbations=[no_template]"))
    # What is measured stays so when a workload is added. Draws depend on the seed.
    perturbed = (*FEW, "evaluate.perturbations=[temperature_1]")
    evaluate.evaluate(run.config(*perturbed, "seed=1", "overwrite=true"))
    assert [workload.name for _, workload, _ in measured] == ["heldout", "heldout · temperature_1"]
    assert "seed: 1 there, 2 here" in message_of(evaluate.evaluate, run.config(*perturbed, "seed=2"))
    weights = load_file(run.weights)
    save_file({**weights, "norm.weight": weights["norm.weight"] + 1}, run.weights)
    run.finish_training()
    with pytest.raises(UserError, match=r"other inputs \(checkpoint: \w+ there, \w+ here"):
        evaluate.evaluate(run.config(*perturbed, "seed=1"))


def test_a_result_stays_until_other_options_have_one(run):
    evaluate.evaluate(run.config(*FEW))
    (run.folder / "evaluate" / "of before").touch()
    too_long = run.config(*FEW, "evaluate.max_new_tokens=128", "overwrite=true")
    assert "leaves no room for a prompt" in message_of(evaluate.evaluate, too_long)
    assert run.manifest["result"]
    evaluate.evaluate(run.config(*FEW, "evaluate.max_new_tokens=5", "overwrite=true"))
    assert run.manifest["result"]["max_new_tokens"] == 5
    assert not (run.folder / "evaluate" / "of before").exists()
    for name in ("manifest.json", "of before"):  # as if that had been killed before its manifest was there
        (run.folder / "evaluate" / name).unlink(missing_ok=name == "of before")
    (run.folder / "evaluate" / "of before").touch()
    evaluate.evaluate(run.config(*FEW))
    assert not (run.folder / "evaluate" / "of before").exists()


def another_vocabulary(run):
    kept = vocab.read(run.folder / "data" / "vocab.safetensors").target_ids
    run.write_data(sorted({*range(50)} - {*kept})[: len(kept)])


def another_target(run):
    """The store is of it."""
    write_store(run.folder)


def other_data(run):
    run.tell_of_data(dataset_fingerprint="b" * 16)


@pytest.mark.parametrize(
    ("change", "option", "message"),
    [
        (another_vocabulary, "seed=0", "is not the vocabulary that the drafter was trained with"),
        (another_target, "seed=0", "was trained for some/target, but target.path is "),
        (other_data, "seed=0", "is not the data that the drafter was trained on"),
        # The drafter's positions end at 128, before the target's 256.
        (lambda run: None, "evaluate.max_new_tokens=118 evaluate.max_speculative_tokens=3", "has at most 2 tokens"),
    ],
)
def test_what_is_refused_before_the_target_is_loaded(run, monkeypatch, change, option, message):
    monkeypatch.setattr(in_process, "load_model", None)
    change(run)
    assert message in message_of(evaluate.evaluate, run.config(*option.split()))


def test_a_copy_of_the_target_is_the_target_and_another_name_is_told_once_the_store_is_gone(run, tmp_path, capsys):
    """Though the run's own store is out of reach, if another one is given that it was trained on."""
    copied, manifest = shutil.copytree(run.target, tmp_path / "copied"), run.folder / "store" / "manifest.json"
    weights = artifacts.weights_fingerprint(str(run.target))
    identity = {"name": run.target.name, "revision": None, "weights": weights, "dtype": "float32"}
    write_store(run.folder, identity)
    saved = run.folder / "train" / "config.yaml"
    saved.write_text(re.sub(r"(?m)^store_dir: .*$", "store_dir: s3://none-of-this-name/store", saved.read_text()))
    given, other = f"target.path={copied}", "was trained for target, but target.path is "
    evaluate.evaluate(run.config(*FEW, given))
    export.export(run.config(*FEW, given))
    assert other not in capsys.readouterr().out
    changed = shutil.copytree(run.target, tmp_path / "changed" / run.target.name)
    (changed / "more.py").write_text("# not the target of training")
    export.export(run.config(*FEW, f"target.path={changed}", "overwrite=true"))
    assert f"was trained for another target than target.path={changed}" in capsys.readouterr().out
    manifest.unlink()
    evaluate.evaluate(run.config(*FEW, given, "evaluate.num_prompts=1", "overwrite=true"))
    assert other in capsys.readouterr().out


def test_results_say_that_drafts_were_sampled_and_export_how_to_serve_them(run, capsys):
    """More of them are accepted than of the greedy drafts that a server makes unless it is told to."""
    sampled = "evaluate.draft_sampling=probabilistic"
    told = []
    for temperature in (1, 0):  # of a greedy target's drafts, the likeliest are taken in any case
        evaluate.evaluate(run.config(*FEW, sampled, f"evaluate.temperature={temperature}", "overwrite=true"))
        told.append("drafts sampled, too" in capsys.readouterr().out)
        for more in ([], [sampled]):
            export.export(run.config(*FEW, *more))
            told.append("set evaluate.draft_sampling=probabilistic here, too" in capsys.readouterr().out)
        told.append("drafts sampled, too" in (run.folder / "export" / "README.md").read_text())
    assert told == [True, True, False, True, *[False] * 4]


@pytest.fixture
def prompts(tmp_path):
    rows = [{"id": f"q{i}", "source": "ab"[i % 2], "prompt": f"hello {'again ' * i}world"} for i in range(12)]
    return f"evaluate.prompts={write_rows(tmp_path / 'prompts.jsonl', rows)}"


def test_a_drafter_that_is_better_is_called_so(run, call, prompts):
    good = run.another("good", learnt=[[2, 5, *[7] * i, 6, 3] for i in range(12)])
    result = call(run.folder, good.folder, prompts, "compare.verified=12")
    (workload,) = result["workloads"]
    assert (workload["name"], workload["prompts"], workload["verified"]) == ("prompts", 12, 12)
    assert result["title"] == "good against run"
    assert workload["verdict"]["good"]["better"] == dict.fromkeys("1234", "good")
    assert all(one["difference"][1] > 0 for one in workload["differences"]["good"].values())
    assert "tokens_per_second" not in workload


def test_a_folder_takes_more_drafters_but_no_fewer_and_no_others(run, call, tmp_path, monkeypatch):
    """That a comparison without the earlier ones takes its place would go unnoticed."""
    monkeypatch.chdir(tmp_path)
    both, others = ([f"x:{run.folder}", f"y:{run.another(name, seed).folder}"] for name, seed in (("b", 1), ("c", 2)))
    file, given = tmp_path / "runs" / "compare" / "x-y" / "result.json", "compare.out=runs/compare/x-y"
    call(*both[:1], given, default=None)
    call(*both, default=None)  # which has that name by itself
    before = file.read_bytes()
    for words in ([*both[:1], given], others):
        code, line = call(*words, default=None)
        assert (code, file.read_bytes()) == (2, before)
        assert f"runs/compare/x-y compares {' '.join(both)}: set another compare.out=…" in line
    call(*others, "overwrite=true", default=None)
    assert json.loads(file.read_text())["trainings"]["y"] == [others[1].removeprefix("y:")]


def test_a_folder_takes_more_prompts_but_no_others(run, call, prompts, tmp_path):
    given, more = f"compare.out={tmp_path / 'mine'}", "evaluate.perturbations=[no_template]"

    def refused(*options):
        code, line = call(run.folder, given, *options, default=None)
        return code, line.partition("is also on prompts that this command does not ask ")[2][:30]

    call(run.folder, given, default=None)
    assert refused(prompts) == (2, "(heldout): set another compare")
    call(run.folder, given, prompts, "overwrite=true", default=None)
    call(run.folder, given, prompts, more, default=None)
    before = (tmp_path / "mine" / "result.json").read_bytes()
    assert refused(prompts) == (2, "(prompts · no_template): set a")
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "hello"}])  # the same file
    assert refused(prompts, more) == (2, "(prompts, prompts · no_templat")
    assert (tmp_path / "mine" / "result.json").read_bytes() == before


def test_published_drafters_need_no_run(run, call, prompts, tmp_path, monkeypatch, capsys):
    for name, seed in (("a", 0), ("b", 1)):
        one = run.another(name, seed)
        export.export(one.config())
        shutil.copytree(one.folder / "export", tmp_path / "published" / name)
    drafts = [tmp_path / "published" / name for name in "ab"]
    config = drafts[0] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_model_name": "some/one"}))
    with_a_run = call(*drafts, prompts, f"+experiment={run.folder / 'train' / 'config.yaml'}")
    monkeypatch.chdir(tmp_path)
    code, line = call(*drafts, f"target.path={run.target}")
    assert code == 2
    assert "data/manifest.json is missing: run `eagle31 data` first, or set evaluate.prompts=FILE" in line
    capsys.readouterr()
    result = call(*drafts, prompts, f"target.path={run.target}", "target.dtype=float32", "evaluate.dtype=float32")
    assert capsys.readouterr().out.count("says that it drafts for some/one, but target.path is ") == 1
    alone = call(drafts[1], prompts, f"target.path={run.target}", "target.dtype=float32", "evaluate.dtype=float32")
    (without,), (beside,), (single,) = (one["workloads"] for one in (result, with_a_run, alone))
    assert (alone["title"], single["drafters"]) == ("b", {"b": without["drafters"]["b"]})
    assert without["drafters"] == beside["drafters"]
    assert [note for note in without["notes"] if "may have" in note] == [
        f"{name} may have been trained on these prompts" for name in "ab"
    ]


def test_drafters_of_other_or_unknown_data(run, call, prompts):
    published, b = run.another("theirs", 5), run.another("b")
    export.export(published.config())
    its_own = published.folder / "export"
    shutil.copytree(its_own, published.folder / "copied")
    result = call(run.folder, f"known:{its_own}", f"theirs:{published.folder / 'copied'}")
    notes = result["workloads"][0]["notes"]
    assert [note for note in notes if "may have" in note] == ["theirs may have been trained on these prompts"]
    known, whole = DrafterCheckpoint.open(its_own), DrafterCheckpoint.open(published.folder)
    assert (known.inputs, known.measured_on) == (whole.inputs, whole.measured_on)
    # Changed since; where that is not the card, its weights perhaps were.
    for name, there in (("README.md", whole.inputs), ("config.json", None)):
        with (its_own / name).open("a") as file:
            file.write("\n")
        assert DrafterCheckpoint.open(its_own).inputs == there
    other_data(b)
    b.finish_training()
    code, line = call(run.folder, b.folder)
    assert code == 2
    said = r"b was trained on other data than .*run/data, .*: set evaluate.prompts=FILE to prompts that no drafter"
    assert re.search(said, line)
    (workload,) = call(run.folder, b.folder, prompts, "evaluate.num_prompts=1")["workloads"]
    assert "b may have been trained on these prompts" in workload["notes"]
    another_target(b)
    assert f"{b.folder} was trained for some/target, but target.path is " in call(run.folder, b.folder, prompts)[1]
