"""What an evaluation depends on, and what it does not: when it is up to date, and how much room its prompts have."""

import dataclasses

import pytest
from safetensors.torch import load_file, save_file

from eagle31_train import artifacts, evaluate
from eagle31_train.measure import drafters, measuring
from eagle31_train.measure.serving import Engine
from eagle31_train.schema import UserError


def test_a_change_of_warmup_alone_changes_nothing(run, capsys):
    evaluate.evaluate(run.config())
    config = run.config()
    evaluate.evaluate(dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, warmup=False)))
    assert "up to date" in capsys.readouterr().out


def test_what_is_measured_is_kept_when_a_workload_is_added(run, monkeypatch):
    evaluate.evaluate(run.config("evaluate.warmup=false"))
    measured = []
    right = measuring.Measurer.measure
    monkeypatch.setattr(
        measuring.Measurer, "measure", lambda self, w, *more: measured.append(w.name) or right(self, w, *more)
    )
    evaluate.evaluate(run.config("evaluate.warmup=false", "evaluate.perturbations=[temperature_1]", "overwrite=true"))
    assert measured == ["heldout · temperature_1"]
    assert [w["name"] for w in run.manifest["result"]["workloads"]] == ["heldout", "heldout · temperature_1"]


@pytest.mark.parametrize("option", ["evaluate.temperature=0.8", "evaluate.perturbations=[temperature_0.8]"])
def test_another_seed_draws_other_answers(run, option, capsys):
    evaluate.evaluate(run.config("seed=1"))
    evaluate.evaluate(run.config("seed=2"))
    assert "up to date" in capsys.readouterr().out, "greedy answers have no seed"
    evaluate.evaluate(run.config("seed=1", option, "overwrite=true"))
    with pytest.raises(UserError, match=r"seed: 1 there, 2 here"):
        evaluate.evaluate(run.config("seed=2", option))


def test_options_of_serving_say_nothing_about_counts(run, capsys):
    evaluate.evaluate(run.config())
    evaluate.evaluate(run.config("evaluate.concurrency=[2]", "evaluate.vllm_python=elsewhere"))
    assert "up to date" in capsys.readouterr().out


def test_a_prompt_leaves_room_for_its_answer_and_drafts(run):
    def room(*options, positions=(8192,), drafted=()):
        return drafters.room(run.config(*options), positions, drafted)

    vllm = "evaluate.backend=vllm"
    assert room(vllm) == 256 - 20 - 2 * 6  # the target's positions, before the drafter's 8192
    assert room(vllm, positions=[None, 100]) == 100 - 20 - 2 * 6
    for name in ("max_model_len", "max-model-len"):
        assert room(vllm, f"evaluate.vllm_args.{name}=100", "evaluate.serve_depths=[2]") == 74
    assert room(vllm, "evaluate.serve_depths=[9]", drafted=[8, 3]) == 256 - 20 - 2 * 10, "the deepest of all"
    for limit in ("32k", "-1", "auto", "0", "4096.5"):
        words = rf"vllm_args\.max_model_len={limit} is no number that prompts can be chosen by: give [^\n]*$"
        with pytest.raises(UserError, match=words):
            room(vllm, f"evaluate.vllm_args.max_model_len={limit}")
    # Without vLLM, its options mean nothing.
    mine = room("evaluate.vllm_args.max_model_len=100", "evaluate.serve_depths=[9]", drafted=[8, 3])
    assert mine == 256 - 20 - 2 * 9
    with pytest.raises(UserError, match=r"target.path=me/nobody cannot be loaded"):
        room("target.path=me/nobody")


def test_another_server_is_not_the_one_that_was_measured(run):
    """What it is comes of other options than evaluate.*, and of vLLM's environment."""
    data = artifacts.read_json(run.folder / "data" / "manifest.json", "the test")

    def inputs(version, *options):
        config = run.config("evaluate.backend=vllm", "extract.engine=vllm", *options)
        return evaluate.stage_inputs(config, data, {}, Engine(version, "some GPU"))

    eight, four = (f"+extract.engine_args={{tensor_parallel_size:{n}}}" for n in (8, 4))
    changed = artifacts.describe_change(inputs("0.32.0", eight), inputs("0.33.0", four))
    assert changed == "server.tensor_parallel_size: 8 there, 4 here; vllm: 0.32.0 there, 0.33.0 here"
    given = "evaluate.vllm_args.tensor_parallel_size=2"
    assert inputs("0.32.0", eight, given) == inputs("0.32.0", four, given), "what is given is what is served"


def test_training_again_to_other_weights_makes_an_evaluation_out_of_date(run, capsys):
    evaluate.evaluate(run.config())
    first = run.manifest["inputs"]
    weights = load_file(run.weights)
    save_file({**weights, "norm.weight": weights["norm.weight"] + 1}, run.weights)
    run.finish_training()
    with pytest.raises(UserError, match=r"other inputs \(checkpoint: \w+ there, \w+ here\): choose"):
        evaluate.evaluate(run.config())
    evaluate.evaluate(run.config("overwrite=true"))
    assert run.manifest["inputs"]["train"] == first["train"]
    assert run.manifest["inputs"]["checkpoint"] != first["checkpoint"]


@pytest.mark.parametrize("trained", [True, False])
def test_prompts_are_those_of_the_exported_drafter(run, monkeypatch, trained):
    """Its room, whatever the options of this command say; and nobody knows what it learnt, where train/ is gone."""

    class EnoughError(Exception):
        pass

    def workloads(_config, _data, longest, doubts):
        raise EnoughError(longest, doubts)

    shape = {"max_position_embeddings": 100}
    record = {"inputs": {"train": "made", "shape": shape}, "checkpoint": "its weights"}
    monkeypatch.setattr(drafters, "exported", lambda _run: record)
    monkeypatch.setattr(evaluate, "check_serving", lambda _config: Engine("0.32.0", "some CPU"))
    monkeypatch.setattr(evaluate.suites, "workloads", workloads)
    if not trained:
        (run.folder / "train" / "manifest.json").unlink()
    with pytest.raises(EnoughError) as told:
        evaluate.serve(run.config("evaluate.backend=vllm", "drafter.max_position_embeddings=8192"))
    longest, doubts = told.value.args
    assert longest == 100 - 20 - 2 * 6
    assert [doubt.startswith("nobody knows whether") for doubt in doubts] == ([] if trained else [True])
