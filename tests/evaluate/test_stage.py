"""The stage: what it reads, what it reports, and what it refuses."""

import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle31_train import artifacts, evaluate, export, vocab
from eagle31_train.drafter.model import Drafter
from eagle31_train.measure import drafters, measuring
from eagle31_train.measure.decoding import decode_plain
from eagle31_train.measure.results import Measured
from eagle31_train.schema import UserError
from eagle31_train.store.sealed import seal
from eagle31_train.targets.cached import CachedTarget


def scripted(monkeypatch, reach):
    """A drafter whose draft at slot i of a prompt agrees with the target for reach(prompt, i) tokens."""

    def unroll(drafter, ids, trajectory, depth, drift):
        return [min(reach(trajectory.prompt, i), depth) for i in range(trajectory.slots)], None

    def decode_speculative(target, drafter, ids, prompts, draft_tokens, limits, sampling, seeds):
        found = decode_plain(target, prompts, limits, sampling, seeds)
        for prompt, one in zip(prompts, found, strict=True):
            reached = [reach(prompt, i) for i in range(len(one.tokens) - 1)]
            one.accepted = Measured("", "", len(one.tokens), reached).rounds(draft_tokens)
        return found

    monkeypatch.setattr(measuring, "unroll", unroll)
    monkeypatch.setattr(measuring, "decode_speculative", decode_speculative)


def test_report(run, capsys):
    evaluate.evaluate(run.config())
    manifest, report = run.manifest, run.manifest["report"]
    assert [p["id"] for p in manifest["per_prompt"]] == ["c0", "c1", "c2"]  # c3 asks what c0 did
    assert all(len(p["prompt_ids"]) == 5 for p in manifest["per_prompt"])
    assert report["prompts"] == 3
    assert report["generated_tokens"] == sum(len(p["output_ids"]) for p in manifest["per_prompt"])
    assert report["drafts"] == sum(p["drafts"] for p in manifest["per_prompt"])
    assert report["draft_tokens_proposed"] == 3 * report["drafts"]
    assert report["acceptance_length"] < 1.3  # it was never trained
    assert report["identical"] is True
    assert manifest["inputs"]["train"] == "e" * 16
    assert manifest["seconds"] > 0
    printed = capsys.readouterr().out
    assert f"{report['acceptance_length']:.3f}" in next(x for x in printed.splitlines() if "acceptance length" in x)
    evaluate.evaluate(run.config())
    assert "up to date" in capsys.readouterr().out


def test_an_oracle_has_acceptance_length_of_draft_tokens_plus_one(run, monkeypatch):
    scripted(monkeypatch, lambda prompt, slot: 8)
    evaluate.evaluate(run.config("evaluate.draft_tokens=4", "evaluate.max_new_tokens=21"))
    report = run.manifest["report"]
    assert report["acceptance_length"] == 5.0
    assert report["acceptance_at_depth"] == [1.0] * 4
    assert report["conditional_acceptance"] == [1.0] * 4
    assert report["by_depth"]["1"]["acceptance_length"] == [2.0, 2.0, 2.0]


def test_what_the_weights_that_it_began_with_had_learnt_nobody_knows(run, capsys):
    evaluate.evaluate(run.config())
    (plain,) = run.manifest["result"]["workloads"]
    path = run.folder / "train" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "inputs": {**manifest["inputs"], "train": {"init_from": "0" * 16}}}))
    shutil.rmtree(run.folder / "evaluate")
    evaluate.evaluate(run.config())
    (warm,) = run.manifest["result"]["workloads"]
    told = "nobody knows whether the weights that smollm2 began with were trained on these prompts"
    assert warm["notes"] == [*plain["notes"], told]
    assert told in capsys.readouterr().out


def test_shares_by_depth(run, monkeypatch):
    scripted(monkeypatch, lambda prompt, slot: 2 * (slot % 2))
    evaluate.evaluate(run.config())
    report = run.manifest["report"]
    one, two, three = report["accepted_per_position"]
    assert one == two > three == 0
    assert report["acceptance_at_depth"] == [one / report["drafts"]] * 2 + [0.0]
    assert report["conditional_acceptance"] == [one / report["drafts"], 1.0, 0.0]
    assert report["acceptance_length"] == 1 + 2 * one / report["drafts"]
    per_prompt = [p["accepted_per_position"] for p in run.manifest["per_prompt"]]
    assert [sum(column) for column in zip(*per_prompt, strict=True)] == report["accepted_per_position"]


def test_an_output_that_differs_is_refused_by_name(run, monkeypatch):
    right = measuring.decode_speculative

    def wrong(*arguments):
        found = right(*arguments)
        found[0].tokens[6] = (found[0].tokens[6] + 1) % 50
        return found

    monkeypatch.setattr(measuring, "decode_speculative", wrong)
    monkeypatch.setattr(measuring.Measurer, "warm_up", lambda *_: None)
    with pytest.raises(UserError, match=r"prompt c\d, output token 6: speculation gives \d+, plain .* \(the target"):
        evaluate.evaluate(run.config())
    with pytest.raises(UserError, match=r"evaluate.dtype=bfloat16 rounds .* use evaluate.dtype=float32"):
        evaluate.evaluate(run.config("evaluate.dtype=bfloat16"))
    assert not (run.folder / "evaluate").exists()


def test_weights_are_rounded_as_the_exporter_rounds_them(run, model):
    config = run.config("target.dtype=bfloat16")
    target = CachedTarget(model, [1, 2, 4])
    drafter = drafters.load(drafters.of_run(run.folder, config.data_folder), "it", target, config).drafter
    exported = export.read_tensors(run.weights, torch.bfloat16)
    trained = load_file(run.weights)
    for name, parameter in drafter.state_dict().items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, exported[name].float()), name
    assert not torch.equal(trained["fc.weight"], exported["fc.weight"].float())
    exact = Drafter(drafter.shape, target.embedding.weight).midlayer.self_attn.rope.inv_freq
    assert torch.equal(drafter.midlayer.self_attn.rope.inv_freq, exact), "RoPE is not rounded with the weights"
    assert drafter.shared_embedding.data_ptr() == target.embedding.weight.data_ptr()
    assert "shared_embedding" not in drafter.state_dict()


def test_other_options_are_not_replaced_unasked(run):
    evaluate.evaluate(run.config())
    with pytest.raises(UserError, match=r"evaluate.draft_tokens: 3 there, 2 here"):
        evaluate.evaluate(run.config("evaluate.draft_tokens=2"))
    evaluate.evaluate(run.config("evaluate.draft_tokens=2", "overwrite=true"))
    assert run.manifest["report"]["draft_tokens"] == 2


def test_without_training(run):
    run.weights.unlink()
    with pytest.raises(UserError, match=r"model.safetensors is missing: run `accelerate launch train.py` again"):
        evaluate.evaluate(run.config())
    (run.folder / "train" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest.json is missing: run `accelerate launch train.py` first"):
        evaluate.evaluate(run.config())


def test_weights_of_another_shape(run):
    weights = load_file(run.weights)
    weights["fc.weight"] = torch.zeros(32, 64)
    save_file(weights, run.weights)
    run.finish_training()
    with pytest.raises(UserError, match=r"does not fit its drafter.json \(.*fc.weight"):
        evaluate.evaluate(run.config())


def test_another_vocabulary(run):
    kept = vocab.read(run.folder / "data" / "vocab.safetensors").target_ids
    spare = next(i for i in range(50) if i not in kept)
    run.write_data(vocab.DraftVocab(torch.tensor([*kept[1:], spare]).sort().values.numpy(), 50))
    with pytest.raises(UserError, match="is not the vocabulary that the drafter was trained with"):
        evaluate.evaluate(run.config())


def test_another_target(run):
    learnt = {"name": "some/target", "revision": None, "weights": "0" * 16, "dtype": "bfloat16"}
    (run.folder / "store").mkdir(exist_ok=True)
    manifest = {"fingerprint": "f" * 16, "inputs": {"target": learnt}}
    (run.folder / "store" / "manifest.json").write_bytes(seal(manifest))
    with pytest.raises(UserError, match="the drafter was trained for some/target"):
        evaluate.evaluate(run.config())


def test_other_data_than_was_trained_on(run):
    """Another split may hold out what was trained on."""
    path = run.folder / "data" / "manifest.json"
    manifest = artifacts.read_json(path, "the test")
    artifacts.write_json(path, {**manifest, "dataset_fingerprint": "b" * 16})
    with pytest.raises(UserError, match="is not the data that the drafter was trained on"):
        evaluate.evaluate(run.config())


def test_damaged_data(run):
    (run.folder / "data" / "dataset" / "dataset_dict.json").write_text("{}")
    with pytest.raises(UserError, match=r"dataset_dict.json has 2 bytes.*run `python -m data_prep` again"):
        evaluate.evaluate(run.config())


@pytest.mark.parametrize("option", ["num_prompts=0", "draft_tokens=0", "max_new_tokens=1", "dtype=int8"])
def test_options_that_measure_nothing(run, option):
    with pytest.raises(UserError, match=option.split("=")[0]):
        evaluate.evaluate(run.config(f"evaluate.{option}"))


def test_a_prompt_that_leaves_no_room_is_not_decoded(run):
    # The drafter's positions end at 128, before the target's 256.
    evaluate.evaluate(run.config("evaluate.max_new_tokens=115", "evaluate.depths=3"))
    assert run.manifest["left_out"] == {"heldout": {}}
    with pytest.raises(UserError, match="none of 4 prompts has at most 4 tokens"):
        evaluate.evaluate(run.config("evaluate.max_new_tokens=116", "evaluate.depths=3", "overwrite=true"))


def test_prompts_of_a_file(run, tmp_path):
    lines = [
        {"id": "a", "source": "one", "prompt": "hello world"},
        {"question_id": 81, "category": "writing", "turns": ["hello", "again"]},
        {"messages": [{"role": "system", "content": "brief"}, {"role": "user", "content": "hello"}]},
        {"messages": [{"role": "user", "content": "world"}, {"role": "assistant", "content": "again"}]},
    ]
    file = tmp_path / "some.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    evaluate.evaluate(run.config(f"evaluate.prompts={file}"))
    found = [(p["id"], p["source"], p["prompt_ids"]) for p in run.manifest["per_prompt"]]
    assert found == [
        ("a", "one", [2, 5, 6, 3]),
        ("some-5", "some", [1, 4, 2, 5, 3]),
        ("81", "writing", [2, 5, 3]),
        ("some-7", "some", [2, 6, 3]),  # in turns of the sources
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is not JSON"),
        ("{}", r"line 2 has no prompt"),
        ('{"prompt": 3}', r"line 2 has no prompt"),
        ('{"prompt": "hello", "tools": "none"}', r"line 2 has tools that are no list"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"line 2 begins with the assistant"),
        ('{"messages": [{"role": "user"}]}', r"line 2 has a message without role or content"),
    ],
)
def test_a_bad_line_is_named(run, tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "hello"}\n' + line)
    with pytest.raises(UserError, match=message):
        evaluate.evaluate(run.config(f"evaluate.prompts={file}"))


def test_tools_and_arguments_of_the_template_are_part_of_a_prompt(run, tmp_path):
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% if brief %}brief {% endif %}"
    (tmp_path / "own.jinja").write_text(template + (run.target / "chat_template.jinja").read_text())
    file = tmp_path / "some.jsonl"
    tools = [{"type": "function", "function": {"name": "world"}}]
    lines = [{"id": "plain", "prompt": "hello"}, {"id": "tools", "prompt": "hello", "tools": tools}]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    more = (f"evaluate.prompts={file}", f"target.chat_template={tmp_path / 'own.jinja'}")
    evaluate.evaluate(run.config(*more))
    assert [p["prompt_ids"] for p in run.manifest["per_prompt"]] == [[2, 5, 3], [6, 2, 5, 3]]
    with pytest.raises(UserError, match=r"workloads\.template_args\.brief: nothing there, True here"):
        evaluate.evaluate(run.config(*more, "target.template_args.brief=true"))
    evaluate.evaluate(run.config(*more, "target.template_args.brief=true", "overwrite=true"))
    assert [p["prompt_ids"] for p in run.manifest["per_prompt"]] == [[4, 2, 5, 3], [6, 4, 2, 5, 3]]


# ---------------------------------------------------------------- by source


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


def test_every_source_is_measured_by_itself(run, monkeypatch, capsys):
    run.write_data(vocab.read(run.folder / "data" / "vocab.safetensors"), sources=["zh", "zh", "en", "en"])
    scripted(monkeypatch, lambda prompt, slot: (prompt[0] + slot) % 4)
    evaluate.evaluate(run.config())
    report, prompts = run.manifest["report"], run.manifest["per_prompt"]
    assert [(p["id"], p["source"]) for p in prompts] == [("c2", "en"), ("c0", "zh"), ("c1", "zh")]
    assert report["by_source"] == {name: recount([p for p in prompts if p["source"] == name]) for name in ("en", "zh")}
    whole = recount(prompts)
    assert {key: report[key] for key in whole} == whole
    lengths = [report["by_source"][name]["acceptance_length"] for name in ("en", "zh")]
    assert lengths[0] != lengths[1], "a mix-up of sources would not show"
    assert min(lengths) < report["acceptance_length"] < max(lengths)
    printed = capsys.readouterr().out
    for name, length in zip(("en", "zh"), lengths, strict=True):
        assert any(line.split()[0] == name and f"{length:.3f}" in line for line in printed.splitlines() if line.strip())
    assert report["not_measured"] == []


def test_a_source_of_which_nothing_is_decoded_is_named(run, capsys):
    kept = vocab.read(run.folder / "data" / "vocab.safetensors")
    run.write_data(kept, sources=["zh", "en", "de", "en"], trained=["zh", "en", "de", "tools"])
    evaluate.evaluate(run.config("evaluate.num_prompts=2"))
    assert list(run.manifest["report"]["by_source"]) == ["de", "en"]
    assert run.manifest["report"]["not_measured"] == ["tools", "zh"]
    assert "not measured: tools, zh (no prompt of these sources was decoded)" in capsys.readouterr().out


def test_no_such_file_of_prompts(run):
    with pytest.raises(UserError, match=r"evaluate.prompts=nowhere.jsonl is no file"):
        evaluate.evaluate(run.config("evaluate.prompts=nowhere.jsonl"))


def test_nothing_held_out(run):
    run.write_data(vocab.read(run.folder / "data" / "vocab.safetensors"), heldout=0)
    with pytest.raises(UserError, match="holds out no prompts"):
        evaluate.evaluate(run.config())


def test_nothing_drafted(run):
    manifest = artifacts.read_json(run.folder / "data" / "manifest.json", "the test")
    artifacts.write_json(run.folder / "data" / "manifest.json", {**manifest, "end_ids": list(range(50))})
    with pytest.raises(UserError, match="every answer ended with its first token"):
        evaluate.evaluate(run.config())


def test_prompts_are_chosen_before_the_target_is_loaded(run, monkeypatch):
    monkeypatch.setattr(evaluate, "load_model", None)
    with pytest.raises(UserError, match=r"evaluate.prompts=nowhere.jsonl is no file"):
        evaluate.evaluate(run.config("evaluate.prompts=nowhere.jsonl"))
    with pytest.raises(UserError, match="none of 4 prompts has at most 4 tokens"):
        evaluate.evaluate(run.config("evaluate.max_new_tokens=116", "evaluate.depths=3"))


@pytest.mark.parametrize(
    ("options", "identical"),
    [
        (["evaluate.perturbations=[temperature_0.7]"], True),
        (["evaluate.draft_sampling=probabilistic"], True),
        (["evaluate.draft_sampling=probabilistic", "evaluate.perturbations=[temperature_0.7]"], False),
    ],
)
def test_outputs_are_equal_only_where_those_of_all_workloads_are(run, options, identical):
    evaluate.evaluate(run.config(*options, "evaluate.num_prompts=2", "evaluate.max_new_tokens=4"))
    assert run.manifest["report"]["identical"] is identical
