"""Outcomes on the disk: nothing is measured twice, nothing that is stale or damaged is believed."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from eagle31_train import artifacts
from eagle31_train.cli import load_config
from eagle31_train.measure import drafters, records
from eagle31_train.measure.acceptance import machine
from eagle31_train.measure.decoding import Limits
from eagle31_train.measure.measuring import Measurer, Outcome
from eagle31_train.measure.results import Drift, Measured
from eagle31_train.schema import UserError
from eagle31_train.targets.cached import CachedTarget
from tests.measure.conftest import PROMPTS, workload_of

ONE, TWO = workload_of(name="one"), workload_of(PROMPTS[:2], 0.7, name="two · temperature_0.7")


class Recorded(Measurer):
    """Tells what was asked of it, and what came of it without decoding; is stopped at the workload `stop`."""

    stop: str | None = None
    machine = "here"
    output = (1, 2)

    def __init__(self, *options):
        config = load_config(["+experiment=smollm2", *options])
        super().__init__(None, Limits(8, ()), config.evaluate, config.seed)
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "config", config)

    def warm_up(self, workload, candidates):
        self.asked.append(f"warm-up with {', '.join(candidate.name for candidate in candidates)}")

    def measure(self, workload, candidates, verified=None):
        if workload.name == Recorded.stop:
            raise KeyboardInterrupt
        self.asked.append((workload.name, [candidate.name for candidate in candidates], verified))
        drift = Drift(*([0.1 * i, 1 / 3] for i in range(6)))
        return {
            c.name: Outcome(
                [list(Recorded.output)] * len(workload.prompts),
                [Measured("p", "s", 2, [3], drift, {3: [1]})],
                2,
                0.1,
                0.3,
            )
            for c in candidates
        }

    def run(self, folder, candidates, workloads=(ONE, TWO), verified=None, end_ids=(2, 1)):
        self.asked.clear()
        inputs = records.inputs(self.config, list(end_ids))
        found, files = records.measured(folder, list(workloads), self, candidates, inputs, verified)
        assert all(file.is_file() for file in files)
        assert [list(one) for one in found] == [[c.name for c in candidates]] * len(workloads)
        return found


@pytest.fixture(autouse=True)
def never_stopped(monkeypatch):
    monkeypatch.setattr(Recorded, "stop", None)
    monkeypatch.setattr(Recorded, "machine", "here")
    monkeypatch.setattr(Recorded, "output", (1, 2))


def test_what_is_kept_is_what_was_measured(model, candidates, tmp_path, monkeypatch):
    options = load_config(["+experiment=smollm2", "evaluate.depths=4"]).evaluate
    real = Measurer(model, Limits(8, ()), options, 0)
    inputs = {"any": 1}
    (first,), files = records.measured(tmp_path, [ONE], real, candidates, inputs)
    monkeypatch.setattr(Recorded, "machine", real.machine)
    (again,), same = records.measured(tmp_path, [ONE], Recorded(), candidates, inputs)
    assert again == first
    assert same == files
    assert all(one.drift is not None and one.seen for outcome in first.values() for one in outcome.measured)


def test_a_measurement_that_was_stopped_goes_on_with_what_is_left(candidates, tmp_path, monkeypatch):
    measurer = Recorded()
    monkeypatch.setattr(Recorded, "stop", TWO.name)
    with pytest.raises(KeyboardInterrupt):
        measurer.run(tmp_path, candidates[:2])
    assert measurer.asked == ["warm-up with llama, mla", ("one", ["llama", "mla"], None)]
    monkeypatch.setattr(Recorded, "stop", None)
    measurer.run(tmp_path, candidates[:2])
    assert measurer.asked == ["warm-up with llama, mla", (TWO.name, ["llama", "mla"], None)]
    measurer.run(tmp_path, candidates[:2])
    assert measurer.asked == []


def test_one_more_drafter_or_workload_is_measured_alone(candidates, tmp_path):
    measurer = Recorded("evaluate.warmup=false")
    measurer.run(tmp_path, candidates[:2], [ONE])
    measurer.run(tmp_path, candidates, [ONE])
    assert measurer.asked == [("one", ["other"], None)]
    measurer.run(tmp_path, candidates[::-1], [TWO, ONE])
    assert measurer.asked == [(TWO.name, ["other", "mla", "llama"], None)]
    better = dataclasses.replace(candidates[0], identity="trained on")
    measurer.run(tmp_path, [better, *candidates[1:]])
    assert [asked[1] for asked in measurer.asked] == [["llama"], ["llama"]]


@pytest.mark.parametrize(
    "option",
    [
        "seed=1",
        "target.dtype=float16",
        "target.revision=v2",
        *(f"evaluate.{option}" for option in ("draft_tokens=2", "depths=7", "max_new_tokens=9")),
        *(f"evaluate.{option}" for option in ("draft_sampling=probabilistic", "batch_size=1", "dtype=float64")),
        "evaluate.drift=false",
    ],
)
def test_other_options_measure_anew(candidates, tmp_path, option):
    Recorded().run(tmp_path, candidates[:1], [ONE])
    other = Recorded(option)
    other.run(tmp_path, candidates[:1], [ONE])
    assert other.asked[1:] == [("one", ["llama"], None)]
    Recorded().run(tmp_path, candidates[:1], [ONE])
    before = Recorded("evaluate.warmup=false", "evaluate.backend=vllm", "evaluate.leave_out=[of-another-set]")
    before.run(tmp_path, candidates[:1], [ONE])
    assert before.asked == [], "the old outcome is kept beside the new one"


def test_another_workload_of_the_same_name_is_measured_anew(candidates, tmp_path):
    measurer = Recorded("evaluate.warmup=false")
    measurer.run(tmp_path, candidates[:1], [ONE])
    for changed in ({"prompts": ONE.prompts[1:]}, {"temperature": 0.1}, {"top_p": 0.5}):
        measurer.run(tmp_path, candidates[:1], [dataclasses.replace(ONE, **changed)])
        assert len(measurer.asked) == 1, changed
    measurer.run(tmp_path, candidates[:1], [dataclasses.replace(ONE, notes=["x"], left_out={"p9": "longer"})])
    assert measurer.asked == [], "what is said of it is counted nowhere"
    measurer.run(tmp_path, candidates[:1], [ONE], verified=2)
    assert measurer.asked == [("one", ["llama"], 2)]
    measurer.run(tmp_path, candidates[:1], [ONE], end_ids=(1, 2))
    assert measurer.asked == [], "end tokens are a set"
    measurer.run(tmp_path, candidates[:1], [ONE], end_ids=(1,))
    assert len(measurer.asked) == 1


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [(records.torch, "__version__", "9.9.9"), (records, "pick_device", lambda name: records.torch.device("meta"))],
)
def test_another_torch_or_kind_of_device_measures_anew(candidates, tmp_path, monkeypatch, owner, name, other):
    measurer = Recorded("evaluate.warmup=false")
    measurer.run(tmp_path, candidates[:1], [ONE])
    monkeypatch.setattr(owner, name, other)
    measurer.run(tmp_path, candidates[:1], [ONE])
    assert len(measurer.asked) == 1


# ---------------------------------------------------------------- another machine


def test_a_record_knows_the_machine_and_the_versions_that_made_it(model, candidates, tmp_path, monkeypatch):
    measurer = Recorded("evaluate.warmup=false")
    measurer.run(tmp_path, candidates[:1], [ONE])
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["outcome"]["machine"] == "here"
    (again,) = measurer.run(tmp_path, candidates[:1], [ONE])
    assert again["llama"].machine == "", "the present machine is told once, of all"
    monkeypatch.setattr(Recorded, "machine", "elsewhere")
    (mixed,) = measurer.run(tmp_path, candidates[:2], [ONE])
    assert {name: outcome.machine for name, outcome in mixed.items()} == {"llama": "here", "mla": ""}
    real = Measurer(model, Limits(8, ()), measurer.options, 0).machine
    assert real.startswith(machine(model.device))
    assert f", torch {torch.__version__}, transformers " in real


def test_drafters_beside_which_the_target_wrote_otherwise_are_not_compared(candidates, tmp_path, monkeypatch):
    measurer = Recorded("evaluate.warmup=false")
    kept: list[Path] = []  # in the order of the drafters, which files' names do not tell
    for candidate in candidates[:2]:
        measurer.run(tmp_path, [candidate], [ONE])
        kept += set(tmp_path.iterdir()) - set(kept)
    monkeypatch.setattr(Recorded, "machine", "elsewhere")
    monkeypatch.setattr(Recorded, "output", (1, 3))
    for _ in range(2):  # just measured, and read again: what is to go is of the other machine
        with pytest.raises(UserError) as error:
            measurer.run(tmp_path, candidates, [ONE])
        assert str(error.value) == (
            "one, prompt p0: the target's output is not the same for llama, mla (measured on here) as for other (on "
            f"elsewhere), so these cannot be compared: remove {kept[0]}, {kept[1]} and run the same command again"
        )
    for file in kept:
        file.unlink()
    measurer.run(tmp_path, candidates, [ONE])
    assert measurer.asked == [("one", ["llama", "mla"], None)]


@pytest.mark.parametrize(("workload", "refused"), [(ONE, True), (TWO, False)])
def test_where_drafts_are_drawn_outputs_may_differ(candidates, tmp_path, monkeypatch, workload, refused):
    measurer = Recorded("evaluate.warmup=false", "evaluate.draft_sampling=probabilistic")
    measurer.run(tmp_path, candidates[:1], [workload])
    monkeypatch.setattr(Recorded, "output", (1, 3))
    with pytest.raises(UserError, match="one, prompt p0: ") if refused else nullcontext():
        measurer.run(tmp_path, candidates, [workload])


# ---------------------------------------------------------------- damage


def half(text):
    return text[: len(text) // 2]


def another_count(text):
    record = json.loads(text)
    record["outcome"]["measured"][0]["accepted"][0] += 1
    return json.dumps(record)


def without_outputs(text):
    record = json.loads(text)
    del record["outcome"]
    return json.dumps(record)


@pytest.mark.parametrize("damage", [half, another_count, without_outputs, lambda text: "[]"])
def test_a_damaged_file_is_one_line(candidates, tmp_path, damage):
    measurer = Recorded()
    measurer.run(tmp_path, candidates[:1], [ONE])
    (file,) = tmp_path.glob("*.json")
    file.write_text(damage(file.read_text()))
    with pytest.raises(UserError, match=r"one-\w+\.json is (damaged|not as it was written).*: remove it") as error:
        measurer.run(tmp_path, candidates[:1], [ONE])
    assert "\n" not in str(error.value)
    file.unlink()
    measurer.run(tmp_path, candidates[:1], [ONE])
    assert len(measurer.asked) == 2


def test_names_of_any_length_and_script_are_files(candidates, tmp_path):
    names = ["x/" * 200, "草稿", "草案"]
    some = [dataclasses.replace(c, name=name) for c, name in zip(candidates, names, strict=True)]
    measurer = Recorded("evaluate.warmup=false")
    measurer.run(tmp_path, some)
    measurer.run(tmp_path, some)
    assert measurer.asked == []
    assert len(list(tmp_path.glob("*.json"))) == 6


def test_a_drafter_under_another_name_is_not_measured_again(candidates, tmp_path):
    """Names change by themselves: a drafter beside one of the same name is called by more of its path."""
    measurer = Recorded("evaluate.warmup=false")
    measurer.run(tmp_path, candidates[:1], [ONE])
    measurer.run(tmp_path, [dataclasses.replace(candidates[0], name="x/llama"), candidates[1]], [ONE])
    assert measurer.asked == [("one", ["mla"], None)]


def test_training_again_from_the_same_inputs_is_another_drafter(run, model):
    def identity():
        config = run.config()
        checkpoint = drafters.of_run(run.folder, config.data_folder)
        loaded = drafters.load(checkpoint, "it", CachedTarget(model, [1, 2, 4]), config)
        assert loaded.identity == checkpoint.identity
        return loaded.identity

    before = identity()
    assert identity() == before
    manifest = artifacts.read_json(run.folder / "train" / "manifest.json", "the test")
    data = bytearray(run.weights.read_bytes())
    data[-1] ^= 1
    run.weights.write_bytes(data)
    run.finish_training()
    assert artifacts.read_json(run.folder / "train" / "manifest.json", "")["inputs"] == manifest["inputs"]
    assert identity() != before
