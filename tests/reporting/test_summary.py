"""The last table: acceptance with its interval, at every depth, and of every source where there are several."""

from eagle31_train import summary
from eagle31_train.cli import load_config

DEPTHS = {"1": {"acceptance_length": [1.5, 1.4, 1.6]}, "3": {"acceptance_length": [1.8125, 1.6, 2.0]}}
SOURCES = {name: {"acceptance_length": length} for name, length in {"zh": 2.3, "en": 3.19, "agent": None}.items()}


def stages(**more):
    numbers = {"acceptance_length": 1.8125, "acceptance_at_depth": [0.5, 0.25, 0.0625], "draft_tokens": 3}
    speed = {"tokens_per_second": {"speculative": 44.04, "plain": 30.06}}
    counts = {"prompts": 20, "generated_tokens": 1183, "dtype": "float32"}
    evaluate = {"report": {**numbers, **speed, **counts, **more.pop("report", {})}, **more}
    train = {"tokens": 5, "pairs": 6, "steps": 7}
    of = {"data": {}, "extract": {}, "train": train, "evaluate": evaluate, "export": {"serve": "vllm serve it"}}
    return {name: {"seconds": 1, **manifest} for name, manifest in of.items()}


def test_the_headline_has_its_interval_and_says_what_it_is_of():
    report = {"by_depth": DEPTHS, "by_source": SOURCES, "workload": "mt_bench"}
    manifests = stages(report=report, result={"workloads": [{"temperature": 0.7, "top_p": 1}]})
    text = summary.table(load_config(["+experiment=smollm2"]), manifests)
    for words in (
        "1.812 [1.600, 2.000] at 3 draft tokens, sampled at temperature 0.7, bonus token included",
        "20 prompts of mt_bench, 1,183 tokens, float32; [low, high]: 95% interval over prompts",
        "1: 1.500   3: 1.812",
        "zh: 2.300   en: 3.190   agent: –",
        "vllm serve it",
    ):
        assert words in text
