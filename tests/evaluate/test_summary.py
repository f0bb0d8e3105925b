"""The last table: acceptance with its interval, at every depth, and of every source where there are several."""

import pytest
from safetensors.torch import load_file, save_file

from eagle31_train import evaluate, summary
from eagle31_train.cli import load_config
from eagle31_train.schema import UserError
from eagle31_train.summary import by_depth, by_source, table


def report(**lengths):
    return {"by_source": {name: {"acceptance_length": length} for name, length in lengths.items()}}


def test_sources_are_told_apart_where_there_are_several():
    assert by_source(report(zh=2.3, en=3.19, agent=None)) == [("  by source", "zh: 2.300   en: 3.190   agent: -")]
    assert by_source(report(zh=2.3)) == []
    assert by_source({}) == []


DEPTHS = {"1": {"acceptance_length": [1.5, 1.4, 1.6]}, "3": {"acceptance_length": [1.8125, 1.6, 2.0]}}


def test_every_number_of_draft_tokens_is_told():
    assert by_depth({"by_depth": DEPTHS}) == [("  by draft tokens", "1: 1.500   3: 1.812")]
    assert by_depth({}) == []


def told(**more):
    numbers = {"acceptance_length": 1.8125, "acceptance_at_depth": [0.5, 0.25, 0.0625], "draft_tokens": 3}
    speed = {"tokens_per_second": {"speculative": 44.04, "plain": 30.06}}
    counts = {"prompts": 20, "generated_tokens": 1183, "dtype": "float32"}
    evaluate = {"report": {**numbers, **speed, **counts, **more.pop("report", {})}, **more}
    train = {"tokens": 5, "pairs": 6, "steps": 7}
    stages = {"data": {}, "extract": {}, "train": train, "evaluate": evaluate, "export": {"serve": "vllm serve it"}}
    return table(load_config(["+experiment=smollm2"]), {name: {"seconds": 1, **of} for name, of in stages.items()})


def test_the_headline_has_its_interval_and_says_what_it_is_of():
    text = told(
        report={"by_depth": DEPTHS, "workload": "mt_bench"}, result={"workloads": [{"temperature": 0.7, "top_p": 1}]}
    )
    assert "1.812 [1.600, 2.000] at 3 draft tokens, sampled at temperature 0.7, bonus token included" in text
    assert "20 prompts of mt_bench, 1,183 tokens, float32; [low, high]: 95% interval over prompts" in text
    assert "1: 1.500   3: 1.812" in text


def test_an_older_evaluation_is_told_without_intervals():
    text = told()
    assert "1.812 at 3 draft tokens, greedy, bonus token included" in text
    assert "20 held-out prompts, 1,183 tokens, float32\n" in text


def test_what_was_measured_of_other_weights_is_not_told(run, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(summary, "read_manifest", lambda config: {})
    monkeypatch.setattr(summary, "table", lambda config, found: f"export {found['export']}")
    monkeypatch.setattr(summary.drafters, "exported", lambda run_dir: asked.append(run_dir) or "is whole")
    evaluate.evaluate(run.config("evaluate.num_prompts=1", "evaluate.max_new_tokens=4"))
    summary.summarise(run.config())
    assert "export is whole" in capsys.readouterr().out
    assert asked == [run.folder]
    weights = load_file(run.weights)
    save_file({**weights, "norm.weight": weights["norm.weight"] + 1}, run.weights)
    run.finish_training()  # from the same inputs
    with pytest.raises(UserError, match=r"evaluate was last run on another training: run `python -m .*` again"):
        summary.summarise(run.config())
