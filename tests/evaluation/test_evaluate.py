"""The stage: what it reads, what it reports, when it is up to date, and what it refuses."""

import itertools

import pytest
import torch
from datasets import DatasetDict
from safetensors.torch import load_file, save_file

from eagle31_train import artifacts, evaluate
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.errors import UserError
from eagle31_train.evaluation import evaluating, measuring
from eagle31_train.evaluation.trajectories import digest
from eagle31_train.evaluation.workloads import MEASURED
from eagle31_train.model import vocab
from eagle31_train.model.drafter import Drafter
from eagle31_train.targets.cached import CachedTarget
from tests.evaluation.conftest import of_another_target

pytestmark = pytest.mark.usefixtures("no_page")
FEW = (
    "evaluate.num_prompts=2",
    "evaluate.max_new_tokens=4",
    "evaluate.max_speculative_tokens=3",
    "evaluate.warmup=false",
)


def recount(prompts, draft_tokens=3):
    """The figures of some prompts, from what the manifest says of every draft."""
    accepted = [count for prompt in prompts for count in prompt["accepted"]]
    reached = [sum(count >= depth for count in accepted) for depth in range(draft_tokens + 1)]
    return {
        "prompts": len(prompts),
        "generated_tokens": sum(len(prompt["output_ids"]) for prompt in prompts),
        "drafts": len(accepted),
        "accepted": sum(accepted),
        "accepted_per_position": reached[1:],
        "acceptance_length": 1 + sum(accepted) / len(accepted),
        "acceptance_at_depth": [count / len(accepted) for count in reached[1:]],
        "conditional_acceptance": [b / a if a else None for a, b in itertools.pairwise(reached)],
    }


# ---------------------------------------------------------------- reports


def test_report(run, capsys):
    evaluate.evaluate(run.config())
    manifest, report = run.manifest, run.manifest["report"]
    assert [p["id"] for p in manifest["per_prompt"]] == ["c0", "c1", "c2"]  # c3 asks what c0 did
    assert all(len(p["prompt_ids"]) == 5 for p in manifest["per_prompt"])
    whole = recount(manifest["per_prompt"])
    assert {key: report[key] for key in whole} == whole
    assert report["draft_tokens_proposed"] == 3 * report["drafts"]
    assert report["acceptance_length"] < 1.3  # it was never trained
    assert report["identical"] is True
    assert manifest["inputs"]["train"] == "e" * 16
    assert manifest["left_out"] == {"heldout": {}}
    assert manifest["seconds"] > 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  3   "))
    assert f"{report['acceptance_length']:.3f}" in row


def test_prompts_that_training_was_measured_on_are_left_out_and_named(run, capsys):
    asked = DatasetDict.load_from_disk(str(run.folder / "data" / "dataset"))["heldout"][1]["input_ids"][:5]
    run.finish_training(measured_on=[digest(asked)])
    evaluate.evaluate(run.config(*FEW))
    assert [prompt["id"] for prompt in run.manifest["per_prompt"]] == ["c0", "c2"]
    assert run.manifest["left_out"] == {"heldout": {"c1": MEASURED}}
    assert f"heldout: left out 1 (c1): {MEASURED}" in capsys.readouterr().out


def test_weights_are_rounded_as_the_exporter_rounds_them(run, model):
    config = run.config("target.dtype=bfloat16")
    target = CachedTarget(model, [1, 2, 4])
    drafter = evaluating.load(DrafterCheckpoint.of_run(run.folder, config.data_folder), "it", target, config).drafter
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


# ---------------------------------------------------------------- when it is up to date


def test_what_makes_an_evaluation_out_of_date(run, capsys, monkeypatch):
    measured = []
    right = measuring.Measurer.measure
    monkeypatch.setattr(
        measuring.Measurer, "measure", lambda self, w, *more: measured.append(w.name) or right(self, w, *more)
    )
    evaluate.evaluate(run.config(*FEW, "seed=1"))
    for same in ("evaluate.warmup=true", "evaluate.concurrency=[2]", "evaluate.vllm_python=elsewhere", "seed=2"):
        evaluate.evaluate(run.config(*FEW, same))
        assert "up to date" in capsys.readouterr().out, same
    with pytest.raises(UserError, match=r"workloads\.leave_out: nothing there"):
        evaluate.evaluate(run.config(*FEW, "evaluate.leave_out=[c0]"))
    # What is measured stays so when a workload is added. Draws depend on the seed.
    perturbed = (*FEW, "evaluate.perturbations=[temperature_1]")
    evaluate.evaluate(run.config(*perturbed, "seed=1", "overwrite=true"))
    assert measured == ["heldout", "heldout · temperature_1"]
    with pytest.raises(UserError, match=r"seed: 1 there, 2 here"):
        evaluate.evaluate(run.config(*perturbed, "seed=2"))
    weights = load_file(run.weights)
    save_file({**weights, "norm.weight": weights["norm.weight"] + 1}, run.weights)
    run.finish_training()
    with pytest.raises(UserError, match=r"other inputs \(checkpoint: \w+ there, \w+ here"):
        evaluate.evaluate(run.config(*perturbed, "seed=1"))


# ---------------------------------------------------------------- refusals


def another_vocabulary(run):
    kept = vocab.read(run.folder / "data" / "vocab.safetensors").target_ids
    spare = next(i for i in range(50) if i not in kept)
    run.write_data(vocab.DraftVocab(torch.tensor([*kept[1:], spare]).sort().values.numpy(), 50))


def another_target(run):
    of_another_target(run.folder)


def other_data(run):
    path = run.folder / "data" / "manifest.json"
    artifacts.write_json(path, {**artifacts.read_json(path, "the test"), "dataset_fingerprint": "b" * 16})


@pytest.mark.parametrize(
    ("change", "option", "message"),
    [
        (another_vocabulary, "seed=0", "is not the vocabulary that the drafter was trained with"),
        (another_target, "seed=0", "the drafter was trained for some/target"),
        (other_data, "seed=0", "is not the data that the drafter was trained on"),
        # The drafter's positions end at 128, before the target's 256.
        (lambda run: None, "evaluate.max_new_tokens=116 evaluate.max_speculative_tokens=3", "has at most 4 tokens"),
    ],
)
def test_what_is_refused_before_the_target_is_loaded(run, monkeypatch, change, option, message):
    monkeypatch.setattr(evaluating, "load_model", None)
    change(run)
    with pytest.raises(UserError, match=message):
        evaluate.evaluate(run.config(*option.split()))
