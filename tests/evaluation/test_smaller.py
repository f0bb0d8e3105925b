"""Drafters made smaller after training: measured as what is exported, and what is exported read again; from the hub,
too. The hub is one on loopback."""

import dataclasses
import json
import re
import sys
from itertools import chain, compress

import pytest
import sample_results
import torch
from datasets import Dataset, DatasetDict
from huggingface_hub import ModelCard
from loopback_hub import problems_of, serving_hub
from made import message_of

from eagle31_train import compare, evaluate, export, summary
from eagle31_train.checkpoint import hub
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.smaller import served, windowed
from eagle31_train.common import artifacts
from eagle31_train.evaluation.trajectories import digest
from tests.evaluation.conftest import END

SMALL, VLLM = ["export_vocab_size=12"], "evaluate.backend=vllm"
OTHERWISE = "was made with other export_ options"


def opened(run, *options):
    return served(run.config(*options))


def loaded(checkpoint, model):
    target = type("Target", (), {"embedding": model.get_input_embeddings(), "head": model.lm_head, "depth": 4})
    return checkpoint.load(target, torch.float32, torch.float32)


def test_a_window_at_export_is_the_one_that_is_trained_with(run, model, capsys):
    """The same weights, with the shape of `drafter.sliding_window`; measured, exported and told so."""
    whole, short = opened(run), opened(run, "export_sliding_window=3")
    assert short.shape == dataclasses.replace(whole.shape, sliding_window=3)
    assert short.identity != whole.identity
    assert all(torch.equal(short.tensors[name], tensor) for name, tensor in whole.tensors.items())
    for stage in (evaluate.evaluate, export.export):
        stage(run.config("export_sliding_window=3"))
    assert "limited to the last 3 positions" in (run.folder / "export" / "README.md").read_text()
    again = DrafterCheckpoint.open(run.folder / "export")
    assert again.shape.sliding_window == 3
    for other in ("", "export_sliding_window=4", "export_sliding_window=3 export_vocab_size=12"):
        assert OTHERWISE in message_of(evaluate.evaluate, run.config(VLLM, *other.split()))
    record = artifacts.read_json(run.folder / "export.json", "the test")
    record["inputs"]["weights_as"] = "int8"  # as an earlier version could export it
    artifacts.write_json(run.folder / "export.json", record)
    assert OTHERWISE in message_of(evaluate.evaluate, run.config(VLLM, "export_sliding_window=3"))


@pytest.mark.parametrize("form", ["vllm", pytest.param("speculators", marks=pytest.mark.slow)])
def test_what_is_served_is_the_export_on_prompts_that_training_was_not_measured_on(run, asked, form):
    first = DatasetDict.load_from_disk(str(run.folder / "data" / "dataset"))["heldout"][0]["input_ids"][:3]
    run.finish_training(measured_on=[digest(first)])
    options = [VLLM, f"evaluate.vllm_python={sys.executable}", f"export_format={form}"]
    options += ["evaluate.serve_speculative_tokens=[2]", "evaluate.concurrency=[1]"]
    export.export(run.config(*options))
    saved = run.folder / "train" / "config.yaml"
    saved.write_text(re.sub(r"(?m)^  path: .*/target$", "  path: /models/unquantized", saved.read_text()))
    evaluate.evaluate(run.config(*options))
    serving = artifacts.read_json(run.folder / "serving" / "manifest.json", "the test")["serving"]
    assert [(row["drafter"], row["draft_tokens"]) for row in serving["rows"]] == [(None, 0), ("smollm2", 2)]
    prompts = {tuple(json.loads(line)["prompt"]) for line in asked.read_text().splitlines()}
    assert len(prompts) == serving["prompts"] == 3
    assert tuple(first) not in prompts
    assert "was trained for unquantized, but target.path is " in serving["notes"][0]
    assert serving["notes"][-1].startswith("left out 1 (heldout-0): used to measure")


def test_the_most_used_tokens_are_kept_and_score_as_before(run, model, capsys):
    whole, small = opened(run), opened(run, "export_vocab_size=6")
    train = Dataset.load_from_disk(str(run.folder / "data" / "dataset" / "train"))
    columns = (chain.from_iterable(train[name]) for name in ("input_ids", "loss_mask"))
    written = list(compress(*columns))
    known = whole.vocab.target_ids.tolist()
    by_use = sorted(known, key=lambda token: (-written.count(token), token))
    ends = [token for token in (END,) if token in known]
    wanted = sorted([*ends, *[token for token in by_use if token not in ends]][:6])
    assert small.vocab.target_ids.tolist() == wanted
    assert small.identity != whole.identity
    share = sum(map(written.count, wanted)) / sum(map(written.count, known))
    assert f"kept 6 of 20 draft tokens, with {share:.2%} of their uses" in capsys.readouterr().out
    z = torch.randn(3, whole.shape.hidden_size)
    before, after = loaded(whole, model).lm_head(z), loaded(small, model).lm_head(z)
    torch.testing.assert_close(after, before[:, [known.index(token) for token in wanted]])
    export.export(run.config("export_vocab_size=6"))
    assert OTHERWISE in message_of(evaluate.evaluate, run.config(VLLM, "export_vocab_size=7"))
    again = DrafterCheckpoint.open(run.folder / "export")
    assert again.vocab.target_ids.tolist() == wanted
    assert again.shape.draft_vocab_size == 6


def test_that_the_draft_vocabulary_is_made_smaller_by_another_option_is_told(run, capsys):
    told = []
    for size in (19, 20, 21):  # training's is 20
        opened(run, f"data.draft_vocab_size={size}")
        told.append("set export_vocab_size=19" in capsys.readouterr().out)
    assert told == [True, False, False]


def test_what_drops_nothing_or_cannot_be_written_or_served_is_refused(run):
    run.tell_of_data(end_ids=DrafterCheckpoint.open(run.folder).vocab.target_ids[:2].tolist())
    assert "must be below the drafter's 20 draft tokens" in message_of(opened, run, "export_vocab_size=20")
    assert "leaves only tokens that end an answer" in message_of(opened, run, "export_vocab_size=2")
    checkpoint = opened(run, "export_sliding_window=8")
    assert "must be below the drafter's window, 8" in message_of(windowed, checkpoint, 8)
    widths = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    shape = dataclasses.replace(checkpoint.shape, architecture="mla", sliding_window=None, **widths)
    mla = dataclasses.replace(checkpoint, shape=shape)
    assert "not serve MLA drafters with sliding_window" in message_of(windowed, mla, 4)
    run.tell_of_data(dataset_fingerprint="0" * 16)  # whose counts are others
    assert "is not the data that the drafter was trained on" in message_of(opened, run, "export_vocab_size=6")


def test_the_card_tells_of_the_smaller_drafter_alone(run, capsys):
    run.finish_training(tokens=46, pairs=26, steps=7, kept={"step": 5})
    evaluate.evaluate(run.config())
    export.export(run.config(*SMALL))
    card = run.folder / "export" / "README.md"
    assert "The acceptance of this checkpoint was not measured." in card.read_text()
    assert "What was measured above includes this." not in card.read_text()
    assert "made from other inputs" in message_of(evaluate.evaluate, run.config(*SMALL))
    evaluate.evaluate(run.config(*SMALL, "overwrite=true"))
    export.export(run.config(*SMALL))
    assert "**Acceptance length" in card.read_text()
    assert "What was measured above includes this." in card.read_text()
    assert "other export_ options" in message_of(summary.summarise, run.config())
    capsys.readouterr()
    summary.summarise(run.config(*SMALL))  # the run has no store, as after a training that wanted no more of it
    told = capsys.readouterr().out
    assert "in 7 steps, of which step 5 is kept" in told
    summary.summarise(run.config(*SMALL, "evaluate.num_speculative_tokens=1"))
    (served,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("serve it")]
    assert served in told, "as it was exported, whatever this command says"
    assert f"{run.folder}/export" in served
    summary.summarise(run.config(*SMALL, "target.path=elsewhere"))
    assert re.search(r"was trained for .*, but target\.path is elsewhere", capsys.readouterr().out)
    # A comparison serves what it measures.
    assert "smaller than the trained drafter" in message_of(compare.exported, str(run.folder))
    assert "made from other inputs" in message_of(export.export, run.config())
    evaluate.evaluate(run.config("overwrite=true"))
    assert "made with other export_ options" in message_of(summary.summarise, run.config()), "another's acceptance"


def test_a_measurement_on_trained_prompts_says_so_beside_its_number(run, capsys):
    run.finish_training(tokens=46, pairs=26, steps=7)
    evaluate.evaluate(run.config())
    manifest = run.folder / "evaluate" / artifacts.MANIFEST
    record = artifacts.read_json(manifest, "the test")
    elsewhere, shared = "run, training 1, was measured on a GPU", "2 of 4 prompts are in the training data, too"
    record["result"]["workloads"][0]["notes"] += ["something else", elsewhere, shared]
    artifacts.write_json(manifest, record)
    export.export(run.config())
    summary.summarise(run.config())
    lines = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines() if "CAUTION" in line]
    assert lines == [f"{elsewhere}; {shared}"], "its speed is that one's"
    head = (run.folder / "export" / "README.md").read_text().partition("**Acceptance length")[2][:300]
    assert "**Caution: 2 of 4 prompts are in the training data, too.**" in head


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.slow), SMALL], ids=["as trained", "smaller"])
def test_downloaded_again_it_gives_the_same_counts(options, run, tmp_path, monkeypatch, capsys):
    with serving_hub(monkeypatch, tmp_path / "cache") as server:
        config = run.config(*options, "target.dtype=float32", "push=true", "repo=me/draft", "private=true")
        evaluate.evaluate(config)
        export.export(config)
        uploaded = server.cards[-1]
        assert server.files("me/draft")["README.md"].decode() == uploaded
        assert problems_of(uploaded) == []
        assert ModelCard(uploaded).data.library_name == "vllm"
        draft = DrafterCheckpoint.open("me/draft")
        assert draft.commit == server.commit("me/draft")
        monkeypatch.chdir(tmp_path)
        measured = json.loads((run.folder / "evaluate" / "manifest.json").read_text())["result"]
        compare.main([str(run.folder), "me/draft", "compare.out=out", "target.dtype=float32", "target.device=cpu"])
        card = run.folder / "export" / "README.md"  # one that the hub refuses
        card.write_text(re.sub(r"^tags: .*$", "tags: [1, {a: 2}]", card.read_text(), flags=re.MULTILINE))
        assert "be uploaded to me/draft" in message_of(hub.push, run.folder / "export", "me/draft", private=False)
    result = artifacts.read_json(tmp_path / "out" / "result.json", "the test")
    trained, downloaded = result["workloads"][0]["drafters"].values()
    ours = next(iter(measured["workloads"][0]["drafters"].values()))
    assert downloaded["by_depth"] == ours["by_depth"]
    assert downloaded["drift"] == ours["drift"]
    assert (trained["drift"] == ours["drift"]) == (not options)


def test_the_summary_of_what_vllm_served(run, capsys):
    """For targets that this process cannot decode there is no other measurement."""
    run.finish_training(tokens=46, pairs=26, steps=7)
    export.export(run.config())
    exported = artifacts.read_json(run.folder / "export.json", "")["checkpoint"]
    serving = {**sample_results.serving(), "workload": "heldout"}
    alone = next(row for row in serving["rows"] if row["drafter"] is None and row["concurrency"] == 1)
    name = next(row["drafter"] for row in serving["rows"] if row["drafter"])
    serving["rows"].append({**alone, "drafter": name, "per_user": [17.0, 16.0, 18.0]})  # at rest: no draft tokens
    drafted = next(row for row in serving["rows"] if row["draft_tokens"] == 3 and row["concurrency"] == 1)
    serving["rows"].append({**drafted, "draft_tokens": 5, "per_user": [40.0, 39.0, 41.0]})  # more than the headline's
    vllm, manifest = run.config(VLLM), run.folder / "serving" / artifacts.MANIFEST
    artifacts.make_folder(manifest.parent)
    record = {"inputs": {"export": "another"}, "serving": serving, "seconds": 3.0}
    artifacts.write_json(manifest, record)
    assert "evaluate was last run on another training" in message_of(summary.summarise, vllm)
    artifacts.write_json(manifest, {**record, "inputs": {"export": exported}})
    capsys.readouterr()
    summary.summarise(vllm)
    told = capsys.readouterr().out
    assert "1.950 at 3 draft tokens, bonus token included, as vLLM counts it" in told
    assert "30.0 tokens/s with the drafter, 20.0 without, for one user of vLLM 0.32" in told
    assert "run `eagle31 evaluate` first" in message_of(summary.summarise, run.config())


def test_a_drafter_made_smaller_in_two_ways_is_known_by_both(run):
    both = [opened(run, f"export_sliding_window={window}", "export_vocab_size=6") for window in (3, 4)]
    assert both[0].identity != both[1].identity
    assert [one.smaller["sliding_window"] for one in both] == [3, 4]


def test_tokens_that_end_answers_stay_however_seldom_they_were_written(run):
    """A drafter without them would propose to go on after every answer."""
    known = opened(run).vocab.target_ids.tolist()
    for ends in (known[:2], known[-2:]):
        run.tell_of_data(end_ids=ends)
        assert {*ends} <= {*opened(run, "export_vocab_size=6").vocab.target_ids.tolist()}
