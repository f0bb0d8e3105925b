"""Regeneration: in rounds, resumable, through the target in process."""

import json
import shutil

import pytest
from regenerating import PROMPTS, make_config, run

from data_prep import regenerate as module
from data_prep.journal import Answered, Journal
from data_prep.messages import parse
from data_prep.regenerate import JOURNAL, OUTPUT
from data_prep.template import ChatTemplate
from eagle31_train.schema import UserError

YES = {"role": "assistant", "content": "yes"}


@pytest.fixture
def config(tmp_path, tiny_target):
    return make_config(tmp_path, tiny_target)


def test_every_turn_is_answered_by_the_target_in_order(config):
    rows = run(config)
    assert [row["id"] for row in rows] == ["one", "two", "three"]
    roles = [[m["role"] for m in row["messages"]] for row in rows]
    assert roles == [["user", "assistant"], ["user", "assistant"] * 3, ["system", "user", "assistant"]]
    assert "someone else" not in json.dumps(rows)
    for row in rows:
        assert row["finish_reason"] == row["messages"][-1]["finish_reason"]
        assert row["finish_reason"] in ("stop", "length")
    assert set(rows[0]) == {"id", "source", "sample", "temperature", "finish_reason", "messages"}


def test_greedy_answers_are_those_of_the_model_step_by_step(config, tiny_target):
    import torch
    from transformers import AutoModelForCausalLM

    template = ChatTemplate.load(config.target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    for row in run(config):
        for i, message in enumerate(row["messages"]):
            if message["role"] != "assistant":
                continue
            ids, answer = template.prompt_ids(row["messages"][:i]), []
            while len(answer) < 6:
                with torch.no_grad():
                    token = int(model(torch.tensor([ids + answer])).logits[0, -1].argmax())
                if token in template.end_ids:
                    break
                answer.append(token)
            assert message["content"] == template.decode(answer, skip_special_tokens=True)


def test_samples_first_greedy_then_sampled_and_reproducible(config, tmp_path):
    config.data.generate.samples, config.data.generate.temperature = 3, 0.9
    rows = run(config)
    assert [(row["id"], row["sample"], row["temperature"]) for row in rows[:3]] == [
        ("one", 0, 0.0), ("one", 1, 0.9), ("one", 2, 0.9),
    ]  # fmt: skip
    assert len({row["messages"][-1]["content"] for row in rows[:3]}) == 3
    config.run_dir, config.data.generate.batch_size = str(tmp_path / "again"), 7
    assert run(config) == rows  # other batches, same draws
    config.run_dir, config.seed = str(tmp_path / "other"), 1
    other = run(config)
    assert [r["messages"] for r in other if r["sample"] == 0] == [r["messages"] for r in rows if r["sample"] == 0]
    assert [r["messages"] for r in other if r["sample"]] != [r["messages"] for r in rows if r["sample"]]


def test_ids_of_samples_stay_apart_when_read_back(config):
    config.data.generate.samples, config.data.generate.temperature = 2, 0.9
    ids = [parse(row, "messages", "f:1", "f-1").id for row in run(config)]
    assert ids == ["one", "one#1", "two", "two#1", "three", "three#1"]


def test_stopped_run_goes_on_where_it_was(config, tmp_path, monkeypatch):
    config.data.generate.samples, config.data.generate.temperature = 2, 0.9
    whole = run(config)
    config.run_dir = str(tmp_path / "resumed")

    add, added = Journal.add, []

    def interrupted(self, key, answer):
        if len(added) == 5:
            raise KeyboardInterrupt
        added.append(key)
        add(self, key, answer)

    monkeypatch.setattr(Journal, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    journal = tmp_path / "resumed" / JOURNAL
    assert len(journal.read_text().splitlines()) == 5
    assert not (tmp_path / "resumed" / OUTPUT).exists()
    with journal.open("a") as file:
        file.write('["a line that was being writ')
    again = []
    monkeypatch.setattr(Journal, "add", lambda self, key, answer: (again.append(key), add(self, key, answer)))
    assert run(config) == whole
    assert not set(added) & set(again)
    assert len(added) + len(again) == 10  # five turns, two samples
    assert not journal.exists()


def test_finished_answers_are_not_made_again_and_not_replaced_unasked(config, monkeypatch, capsys):
    rows = run(config)
    monkeypatch.setattr(module, "answer_all", lambda *_: pytest.fail("answered again"))
    assert run(config) == rows
    assert "up to date" in capsys.readouterr().out
    config.data.generate.max_new_tokens = 5
    with pytest.raises(UserError, match=r"max_new_tokens: 6 there, 5 here.*overwrite=true"):
        run(config)


def test_answers_of_unknown_origin_are_left_alone(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / OUTPUT).write_text("mine\n")
    with pytest.raises(UserError, match="move it away, or overwrite=true"):
        run(config)
    assert (tmp_path / "run" / OUTPUT).read_text() == "mine\n"


def test_journal_goes_on_after_a_line_that_was_being_written(tmp_path):
    path = tmp_path / JOURNAL
    path.write_text('["a", "yes", "stop", 1]\n["b", "n')
    with Journal(path) as journal:
        assert set(journal.answers) == {"a"}
        journal.add("c", Answered({**YES, "content": "no"}, "length", 2))
    with Journal(path) as journal:
        assert journal.answers == {"a": Answered(YES, "stop", 1), "c": Answered({**YES, "content": "no"}, "length", 2)}


def test_journal_damaged_in_the_middle_is_named(tmp_path):
    path = tmp_path / JOURNAL
    path.write_text('["k", "yes", "stop", 1]\nnonsense\n')
    with pytest.raises(UserError, match=":2 is damaged"), Journal(path):
        pass


def test_samples_at_temperature_zero_are_refused(config):
    config.data.generate.samples = 2
    with pytest.raises(UserError, match=r"set data\.generate\.temperature above 0"):
        run(config)


def test_prompts_that_cannot_be_asked_are_named(config, tmp_path, capsys):
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"id": "bad", "messages": [{"role": "system", "content": "x"}]}) + "\n")
    assert len(run(config)) == 3
    assert "refused bad (prompts.jsonl:4): no user turn" in capsys.readouterr().out
    (entry,) = module.answered(tmp_path / "run")["refused"]
    assert entry == {"id": "bad", "source": "prompts", "where": "prompts.jsonl:4", "reason": "no user turn"}


def test_one_prompt_too_long_for_the_target_is_refused_alone(config, tmp_path, capsys):
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "turns": ["fox " * 600, "never asked"]}) + "\n")
    config.data.generate.samples, config.data.generate.temperature = 2, 0.9
    assert [row["id"] for row in run(config)] == ["one", "one", "two", "two", "three", "three"]
    reason = "the prompt and 6 tokens of answer exceed the target's 512 positions"
    assert module.answered(tmp_path / "run")["refused"] == [
        {"id": i, "source": "prompts", "where": "prompts.jsonl:4", "reason": reason} for i in ("long", "long#1")
    ]
    assert f"refused long (prompts.jsonl:4): {reason}" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "run" / module.MANIFEST).read_text())
    assert manifest["answers"] == 10


def test_a_conversation_that_grows_too_long_keeps_the_answers_that_it_has(config, tmp_path, capsys):
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "turns": ["hello", "fox " * 600, "never asked"]}) + "\n")
    *_, row = run(config)
    assert row["id"] == "long"
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    manifest = module.answered(tmp_path / "run")
    reason = "the prompt and 6 tokens of answer exceed the target's 512 positions"
    ended = {"id": "long", "source": "prompts", "where": "prompts.jsonl:4", "reason": reason, "turns_left": 2}
    assert (manifest["ended"], manifest["refused"], manifest["answers"]) == ([ended], [], 6)
    assert f"1 conversations end before their prompts do, since {reason}" in capsys.readouterr().out


def test_one_prompt_that_the_template_refuses_does_not_stop_the_others(config, tmp_path):
    strict = "{% if messages[0].content == 'hello' %}{{ raise_exception('no greetings') }}{% endif %}"
    (tmp_path / "strict.jinja").write_text(strict + ChatTemplate.load(config.target).template)
    config.target.chat_template = str(tmp_path / "strict.jinja")
    assert [row["id"] for row in run(config)] == ["two", "three"]
    (entry,) = module.answered(tmp_path / "run")["refused"]
    assert entry["id"] == "one"
    assert "no greetings" in entry["reason"]


def test_no_prompt_answered_at_all(config, tmp_path):
    config.data.generate.max_new_tokens = 600
    with pytest.raises(UserError, match=r"no prompt was answered \(3 × the prompt .* 512 positions\)"):
        run(config)
    assert not (tmp_path / "run" / OUTPUT).exists()


def test_other_weights_under_the_same_name_are_another_target(config, tmp_path, tiny_target):
    """Neither the finished answers nor the journal of one may pass for the other's."""
    for copy in ("a", "b"):
        shutil.copytree(tiny_target, tmp_path / copy / "target")
    weights = tmp_path / "b" / "target" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    config.target.path = str(tmp_path / "a" / "target")
    run(config)
    (tmp_path / "moved").mkdir()
    (tmp_path / "a" / "target").rename(tmp_path / "moved" / "target")
    config.target.path = str(tmp_path / "moved" / "target")
    run(config)  # elsewhere, but the same
    config.target.path = str(tmp_path / "b" / "target")
    with pytest.raises(UserError, match=r"made from other inputs \(weights: "):
        run(config)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_kill_between_answers_and_manifest_is_gone_on_from(config, tmp_path, monkeypatch, damaged):
    if damaged:  # the second run's kill: the first one's output was spoilt meanwhile
        run(config)
        (tmp_path / "run" / OUTPUT).write_text("spoilt")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.artifacts, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    left = (tmp_path / "run" / OUTPUT).read_text()
    if not damaged:
        monkeypatch.setattr(module.Local, "answers", lambda _, jobs: iter(()) if not jobs else pytest.fail("asked"))
    run(config)
    assert (tmp_path / "run" / OUTPUT).read_text() == left
    assert len(module.answered(tmp_path / "run")["refused"]) == 0


def test_a_kill_after_damage_was_seen_is_gone_on_from(config, tmp_path, monkeypatch):
    rows = run(config)
    (tmp_path / "run" / OUTPUT).write_text("spoilt")
    monkeypatch.setattr(Journal, "__enter__", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    assert run(config) == rows


def test_the_journal_is_of_one_run_at_a_time(config, tmp_path, monkeypatch):
    """Until it is removed: a second run beside the first would answer everything again, into the same file."""
    write, refused = module.artifacts.write_json, []

    def beside(*arguments):
        with pytest.raises(UserError, match=r"partial is being written by another run: wait for it"):
            Journal(tmp_path / "run" / JOURNAL).__enter__()
        refused.append(True)
        write(*arguments)

    monkeypatch.setattr(module.artifacts, "write_json", beside)
    run(config)
    assert refused
    path = tmp_path / JOURNAL
    path.write_text('["a", "yes", "stop", 1]\n')
    with Journal(path) as journal:
        journal.file.write(b'["b", "half a li')
        journal.file.flush()
        with pytest.raises(UserError, match="another run"), Journal(path):
            pass
        assert path.read_text().endswith("half a li"), "what the other is writing is left alone"


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("concurrency", 0, "asks nothing: set at least 1"),
        ("batch_size", 0, "asks nothing: set at least 1"),
        ("max_new_tokens", 0, "asks nothing: set at least 1"),
        ("temperature", -1.0, "set 0, which is greedy, or above"),
        ("temperature", float("nan"), "set 0, which is greedy, or above"),
        ("top_p", 0.0, r"is not in \(0, 1\]"),
        ("top_p", 1.5, r"is not in \(0, 1\]"),
        ("server", "localhost:8000", "write it as in http://localhost:8000/v1"),
    ],
)
def test_options_that_could_not_be_met_are_refused_before_anything_is_asked(config, option, value, told):
    setattr(config.data.generate, option, value)
    with pytest.raises(UserError, match=rf"data\.generate\.{option}=.* {told}"):
        run(config)


def test_changed_prompts_are_other_prompts_though_their_files_have_one_name(config, tmp_path):
    for folder, row in zip("ab", PROMPTS, strict=False):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_text(json.dumps(row) + "\n")
    config.data.prompts = str(tmp_path / "[ab]" / "x.jsonl")
    rows = run(config)
    assert run(config) == rows
    config.data.format = "turns"
    with pytest.raises(UserError, match=r"made from other inputs \(format: \w+ there, turns here\)"):
        run(config)
    config.data.format = "auto"
    (tmp_path / "a" / "x.jsonl").write_text(json.dumps({**PROMPTS[0], "turns": ["another"]}) + "\n")
    with pytest.raises(UserError, match="made from other inputs"):
        run(config)


def test_tools_that_the_template_does_not_write_are_told_before_anything_is_asked(config, tmp_path, capsys):
    tool = {"type": "function", "function": {"name": "find", "parameters": {}}}
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"id": "four", "turns": ["hello"], "tools": [tool]}) + "\n")
    run(config)
    assert "answers: 1 are asked for with tools, which the target's chat template does not write" in (
        capsys.readouterr().out
    )
