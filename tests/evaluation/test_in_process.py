"""Measurements are kept: nothing is measured twice, nothing that is stale or damaged is believed."""

import dataclasses
import json

import pytest
from configured import configured
from made import message_of

from eagle31_train import compare, provenance
from eagle31_train.common.errors import UserError
from eagle31_train.evaluation import in_process
from eagle31_train.evaluation.decoding import Limits
from eagle31_train.evaluation.measurement import Counts, Drift, Measurement
from eagle31_train.evaluation.measurer import Measurer
from tests.evaluation.conftest import PROMPTS, workload_of

ONE, TWO = workload_of(name="one"), workload_of(PROMPTS[:2], 0.7, name="two · temperature_0.7")
QUIET = "evaluate.warmup=false"


class Recorded(Measurer):
    """Tells what was asked of it, and what came of it without decoding; is stopped at the workload `stop`."""

    stop: str | None = None
    machine = "here"
    output = (1, 2)

    def __init__(self, *options):
        config = configured(*options)
        super().__init__(None, Limits(8, ()), config.evaluate, config.seed)
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "config", config)

    def warm_up(self, workload, candidates):
        self.asked.append(f"warm-up with {', '.join(candidate.name for candidate in candidates)}")

    def measure(self, workload, candidates):
        if workload.name == Recorded.stop:
            raise KeyboardInterrupt
        self.asked.append((workload.name, [candidate.name for candidate in candidates]))
        drift = Drift(*([0.1 * i, 1 / 3] for i in range(6)))
        outputs, counts = [list(Recorded.output)] * len(workload.prompts), [Counts("p", "s", 2, [3], drift, {3: [1]})]
        return {candidate.name: Measurement(outputs, counts, 2, 0.1, 0.3) for candidate in candidates}

    def run(self, folder, candidates, workloads=(ONE, TWO), verified=None):
        self.asked.clear()
        candidates = [dataclasses.replace(one, verified=verified) for one in candidates]
        inputs = provenance.of_workload(self.config, [1, 2], "cpu", "2.9")
        return in_process.measure(folder, workloads, self, candidates, inputs)


def test_what_is_read_is_what_was_measured(model, candidates, tmp_path, monkeypatch):
    options = configured("evaluate.max_speculative_tokens=4").evaluate
    real = Measurer(model, Limits(8, ()), options, 0)
    (first,) = in_process.measure(tmp_path, [ONE], real, candidates, {"any": 1})
    monkeypatch.setattr(Recorded, "machine", real.machine)
    (again,) = in_process.measure(tmp_path, [ONE], Recorded(), candidates, {"any": 1})
    assert again == first
    assert all(one.drift is not None and one.seen for measurement in first.values() for one in measurement.counts)


def test_what_is_left_is_measured_alone(candidates, tmp_path, monkeypatch):
    """After a stop, and where a drafter or a workload is added. By what it is: names may be of any length and script,
    and change with what stands beside a drafter."""
    cold, warm = Recorded(QUIET), Recorded()
    monkeypatch.setattr(Recorded, "stop", TWO.name)
    for measurer in (cold, warm):  # a cold speed is no warm one
        with pytest.raises(KeyboardInterrupt):
            measurer.run(tmp_path, candidates[:1])
    assert warm.asked == ["warm-up with llama", *cold.asked] == ["warm-up with llama", ("one", ["llama"])]
    monkeypatch.setattr(Recorded, "stop", None)
    measurer = Recorded(QUIET)
    renamed = [dataclasses.replace(candidates[0], name="草/" * 200), *candidates[1:]]
    measurer.run(tmp_path, renamed, [ONE])
    assert measurer.asked == [("one", ["mla", "other"])]
    measurer.run(tmp_path, candidates[::-1], [TWO, ONE])
    assert measurer.asked == [(TWO.name, ["other", "mla", "llama"])]
    better = dataclasses.replace(candidates[0], identity="trained on")
    measurer.run(tmp_path, [better, *candidates[1:]])
    assert [asked[1] for asked in measurer.asked] == [["llama"], ["llama"]]


def test_what_other_options_or_versions_count_is_measured_anew(candidates, tmp_path):
    Recorded(QUIET).run(tmp_path, candidates[:1], [ONE])
    other = Recorded(QUIET, "evaluate.draft_sampling=probabilistic")  # the further ones: tests/test_provenance.py
    other.run(tmp_path, candidates[:1], [ONE])
    assert other.asked == [("one", ["llama"])]
    same = Recorded(QUIET, "evaluate.backend=vllm", "evaluate.num_prompts=7")
    same.run(tmp_path, candidates[:1], [ONE])
    assert same.asked == [], "the first measurement is kept beside the others"
    for changed in ({"prompts": ONE.prompts[1:]}, {"temperature": 0.1}, {"top_p": 0.5}, {"top_k": 20}):
        same.run(tmp_path, candidates[:1], [dataclasses.replace(ONE, **changed)])
        assert len(same.asked) == 1, changed
    same.run(tmp_path, candidates[:1], [dataclasses.replace(ONE, notes=["x"], left_out={"p9": "longer"})])
    assert same.asked == [], "what is said of it is counted nowhere"
    same.run(tmp_path, candidates[:1], [ONE], verified=2)
    assert len(same.asked) == 1


def test_drafters_beside_which_the_target_wrote_otherwise_are_not_compared(candidates, tmp_path, monkeypatch):
    measurer = Recorded(QUIET)
    measurer.run(tmp_path, candidates[:1], [ONE])
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr(Recorded, "machine", "elsewhere")
    monkeypatch.setattr(Recorded, "output", (1, 3))
    for _ in range(2):  # just measured, and read again
        with pytest.raises(UserError, match=rf"prompt p0: .* not the same .*llama on here.*remove {file}"):
            measurer.run(tmp_path, candidates, [ONE])
    file.unlink()
    measurer.run(tmp_path, candidates, [ONE])
    assert measurer.asked == [("one", ["llama"])]


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: text.replace("0.3", "0.4")])
def test_a_damaged_file_is_refused(candidates, tmp_path, damage):
    measurer = Recorded(QUIET)
    measurer.run(tmp_path, candidates[:1], [ONE])
    (file,) = tmp_path.glob("*.json")
    file.write_text(damage(file.read_text()))
    with pytest.raises(UserError, match=r"one-\w+\.json is damaged.*: remove it"):
        measurer.run(tmp_path, candidates[:1], [ONE])


LINEAR, DYNAMIC = ({"rope_type": kind, "factor": 4.0, "rope_theta": 1e4} for kind in ("linear", "dynamic"))
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
EACH = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 1000}
LONGEST = [
    ({"model_type": "llama"}, 1000),
    ({"model_type": "llama", "rope_parameters": LINEAR}, 4000),
    ({"model_type": "llama", "rope_parameters": DYNAMIC}, 1000),  # vLLM counts 4,000, and its table ends here
    ({"model_type": "gemma3_text", "rope_parameters": EACH}, 1000),  # of the stretched RoPE
    ({"model_type": "phi3", "rope_parameters": LONG, "original_max_position_embeddings": 250}, 250),  # by default
]


@pytest.mark.parametrize(("target", "longest"), LONGEST)
def test_prompts_are_as_long_as_vllm_serves_their_target(tmp_path, target, longest):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **target}))
    config = configured(f"target.path={tmp_path}", "evaluate.backend=vllm", "evaluate.serve_speculative_tokens=[3]")
    assert in_process.longest_prompt(config, [None]) == longest - config.evaluate.max_new_tokens - 2 * 4
    here = configured(f"target.path={tmp_path}")  # nor are a longrope's keys in process what they are in vLLM beyond
    assert in_process.longest_prompt(here, [None]) == longest - config.evaluate.max_new_tokens - 2
    if "250" in (tmp_path / "config.json").read_text():
        told = configured(f"target.path={tmp_path}", "evaluate.backend=vllm", "evaluate.vllm_args={max_model_len: 900}")
        drafts = 2 * (max(told.evaluate.serve_speculative_tokens) + 1)
        assert in_process.longest_prompt(told, [None]) == 900 - config.evaluate.max_new_tokens - drafts


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["plain:a"], "plain is reserved for decoding without a drafter: choose another name, as NAME:a"),
        (["x:a", "x:b"], "two drafters are called x: tell them apart as NAME:b"),
        (["x:a,a"], "x:a,a lists a training twice"),
        (["x:a,b", "x/1", "y/2/1"], "x/1 is both a training of x and another drafter"),
    ],
)
def test_drafters_that_a_table_cannot_tell_apart_are_refused(words, problem):
    assert problem in message_of(compare.named, words)


def test_an_export_is_called_after_its_run():
    assert list(compare.named(["/d/runs/a/export"])) == ["a/export"]
    assert list(compare.named(["/d/runs/a", "/d/runs/a/export", "/e/b"])) == ["a", "a/export", "b"]
