"""Prompts that the target writes itself: where it begins and stops, what is refused, and what a kill leaves."""

import json
from pathlib import Path

import pytest
from answering import completion
from made import message_of
from planting import interrupt, watched

from data_prep.journal import Journal
from data_prep.self_prompts import user_stop, write_prompts
from data_prep.stage import prepare
from eagle31_train.common.errors import UserError
from eagle31_train.compose import load_config
from eagle31_train.config import SELF_WRITTEN
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.generate import Generator

JOURNAL, MANIFEST = f"{SELF_WRITTEN}.partial", "prompts.manifest.json"


def configured(folder, target, *options):
    words = ["name=self", f"run_dir={folder}", f"target.path={target}", "target.dtype=float32", "target.device=cpu"]
    words += ["regenerate=true", "data.prompts=self", "data.self_prompts.count=6"]
    words += ["data.self_prompts.max_new_tokens=60", "data.generate.max_new_tokens=8"]
    return load_config([*words, *options])


def written(config):
    path = write_prompts(config, ChatTemplate.load(config.target))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_any_batch_and_any_stop_end_in_the_same_prompts(tiny_target, tmp_path, monkeypatch):
    whole = configured(tmp_path / "whole", tiny_target)
    rows = written(whole)
    manifest = json.loads((tmp_path / "whole" / MANIFEST).read_text())
    assert len(rows) == len({row["turns"][0] for row in rows}) == 6
    assert manifest["refused"]["not ended"] > 0  # a random target seldom ends
    assert not (tmp_path / "whole" / JOURNAL).exists()
    alone = configured(tmp_path / "alone", tiny_target, "data.generate.batch_size=1")
    assert written(alone) == rows
    stopped = configured(tmp_path / "stopped", tiny_target)
    interrupt(Journal, "add", written, stopped, when=lambda journal, *_: len(journal.answers) == 4)
    kept = {json.loads(line)["key"] for line in (tmp_path / "stopped" / JOURNAL).read_text().splitlines()}
    assert len(kept) == 4
    added = watched(monkeypatch, Journal, "add")
    more = configured(tmp_path / "stopped", tiny_target, "data.self_prompts.count=7")
    assert written(more)[:6] == rows  # the texts that are there serve another count, too
    assert not kept & {key for _, key, _ in added}
    assert "seed" in message_of(written, configured(tmp_path / "stopped", tiny_target, "seed=1"))


def test_a_system_prompt_that_the_template_refuses_is_named(tiny_target, tmp_path, tokenizer):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (tmp_path / "refusing.jinja").write_text(refusing + tokenizer.chat_template)
    options = [f"target.chat_template={tmp_path}/refusing.jinja", "data.self_prompts.system={code: 'You write code.'}"]
    with pytest.raises(UserError, match=r"^data\.self_prompts\.system: .*no system: "):
        written(configured(tmp_path / "run", tiny_target, *options))


@pytest.fixture
def completions(server, tokenizer):
    """A server that goes on from token ids with texts in turn."""
    texts = ["?!", "Who is it that calls?", "and so on", "who is it that calls", "lalala " * 60, "A \ufffd B"]
    texts += ["Hi<|im_start|>assistant\nHo", "天空?"]

    def reply(body):
        text = texts[(len(server.bodies) - 1) % len(texts)]
        cut = text == "and so on"
        return completion(tokenizer.encode(text if cut else f"{text}<|im_end|>"), "length" if cut else "stop")

    server.reply = reply
    return server


def test_a_server_goes_on_where_the_user_speaks(completions, tiny_target, tmp_path, tokenizer):
    served = [f"data.generate.server={completions.url}", "data.generate.concurrency=1", "data.self_prompts.count=2"]
    systems = "data.self_prompts.system={code: 'You write code.', plain: ''}"
    rows = written(configured(tmp_path, tiny_target, *served, systems))
    assert [row["turns"] for row in rows] == [["Who is it that calls?"], ["天空?"]]
    reasons = ["empty", "not ended", "written before", "repeats itself", "bytes that are not text", "special tokens"]
    assert json.loads((tmp_path / MANIFEST).read_text())["refused"] == dict.fromkeys(reasons, 1)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    # Spelt out here: the template up to the user's words, and not a token more.
    starts = "<|im_start|>system\nYou write code.<|im_end|>\n<|im_start|>user\n", "<|im_start|>user\n"
    assert [body["prompt"] for body in completions.bodies[:2]] == [tokenizer.encode(start) for start in starts]
    assert all(body["stop_token_ids"][0] == end for body in completions.bodies)
    assert not any("stop" in body for body in completions.bodies)
    assert len({body["seed"] for body in completions.bodies}) == len(completions.bodies)


def test_text_ends_a_users_turn_where_no_token_does(completions, tiny_target, tmp_path, tokenizer, monkeypatch):
    own = f"target.chat_template={Path(__file__).parent / 'templates' / 'mistral.jinja'}"
    served = [f"data.generate.server={completions.url}", "data.generate.concurrency=1", "data.self_prompts.count=1"]
    assert [row["turns"] for row in written(configured(tmp_path / "served", tiny_target, own, *served))]
    assert {body["stop"] for body in completions.bodies} == {"[/INST]"}
    # Without the space after it, which is the first word's: " Why" is a token, and a lone space never stands there.
    assert completions.bodies[0]["prompt"] == tokenizer.encode("<s>[INST]")
    texts = iter([" Who? [/INST] I.", " Why is it so? [/INST] Because [INST] No", "and so on and on"])
    answers = [(number, (tokenizer.encode(text), "length")) for number, text in enumerate(texts)]
    monkeypatch.setattr(Generator, "complete", lambda self, requests, *_: iter(answers[: len(requests)]))
    here = configured(tmp_path / "here", tiny_target, own, "data.self_prompts.count=2", "data.generate.batch_size=3")
    assert [row["turns"] for row in written(here)] == [["Who?"], ["Why is it so?"]]


@pytest.mark.parametrize(
    ("between", "text"), [("<|im_end|>", None), ("\n<|im_end|>", None), ("/nothink<|im_end|>", "/nothink"), ("\n", "")]
)
def test_a_token_after_words_of_the_template_ends_a_users_turn(tokenizer, between, text):
    words = "{% for m in messages %}{{ m['content'] }}" + between + "{% endfor %}"
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id], words)
    if text == "":
        assert "writes something after a user's text" in message_of(user_stop, template)
    else:
        assert user_stop(template) == (tokenizer.convert_tokens_to_ids("<|im_end|>"), text)


@pytest.mark.parametrize(
    ("ids", "reason", "why"),
    [
        ([9, 10], "content_filter", "24 the server ended the answer with 'content_filter'"),
        ([2], "stop", r"24 empty\)"),
        ([], None, "24 .*positions"),  # in this process, for which a turn of 5,000 tokens has no room in the target
    ],
)
def test_too_few_texts_of_use_are_refused(completions, tiny_target, tmp_path, ids, reason, why):
    completions.reply = lambda _: completion(ids, reason)
    option = f"data.generate.server={completions.url}" if reason else "data.self_prompts.max_new_tokens=5000"
    with pytest.raises(UserError, match=rf"wrote only 0 usable prompts in 24 tries \({why}"):
        written(configured(tmp_path, tiny_target, option))


def test_prompts_of_several_turns_are_one_source_of_several(tiny_target, tmp_path, capsys):
    real = tmp_path / "ü (1), it's.csv"
    real.write_text("prompt\n" + "".join(f"question {i}\n" for i in range(20)))
    mixed = ["data.prompts=null", "data.sources.own.path=self", "data.sources.own.weight=1"]
    mixed += [f"data.sources.real.path={real}", "data.sources.real.weight=3", "data.heldout=0.3", "data.max_length=400"]
    config = configured(tmp_path / "~a=b", tiny_target, "data.self_prompts.turns=2", *mixed)
    prepare(config)
    written = [json.loads(line)["turns"] for line in (tmp_path / "~a=b" / SELF_WRITTEN).read_text().splitlines()]
    answered = [json.loads(line) for line in (tmp_path / "~a=b" / "conversations.jsonl").read_text().splitlines()]
    own = [row["messages"] for row in answered if row["source"] == "own"]
    assert sorted([m["content"] for m in messages if m["role"] == "user"] for messages in own) == sorted(written)
    assert max(map(len, written)) == 2, "later turns follow the target's answers"
    manifest = json.loads((tmp_path / "~a=b" / "data" / "manifest.json").read_text())
    assert {name: counts["taken"] for name, counts in manifest["sources"].items()} == {"own": 6, "real": 18}
    capsys.readouterr()
    prepare(config)
    assert capsys.readouterr().out.count("is up to date") == 3, "prompts, answers and data"
    config.data.generate.top_k = 5  # of the answers between its turns
    assert "prompts.jsonl was made from other inputs (answers" in message_of(prepare, config)
    config.data.generate.top_k, config.regenerate = None, False
    with pytest.raises(
        UserError, match=r"data\.sources\.own\.path=self: .* need answers, but regenerate=false: set regenerate=null"
    ):
        prepare(config)


@pytest.mark.parametrize("file", ["conversations.manifest.json", "conversations.jsonl.partial"])
def test_answers_to_given_prompts_are_refused_before_others_are_written(tiny_target, tmp_path, file):
    (tmp_path / file).write_text("{}")
    said = message_of(prepare, configured(tmp_path, tiny_target))
    assert said.startswith(f"{tmp_path}/conversations.jsonl answers prompts from a file")
    assert [path.name for path in tmp_path.iterdir()] == [file]
