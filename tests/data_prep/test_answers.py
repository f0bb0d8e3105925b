"""Answers of the target in this process whose bytes are no text."""

from types import SimpleNamespace

import pytest

from data_prep.answers import BROKEN, Job, Local
from data_prep.dialogue import turns_of
from data_prep.formats import Refused, Row
from eagle31_train.config import Config, DataConfig, GenerateConfig, TargetConfig

FOX = "hello 🦊"


@pytest.fixture
def config():
    generate = GenerateConfig(server="http://localhost:1/v1", concurrency=2, max_new_tokens=6)
    return Config(name="t", target=TargetConfig(path="t"), data=DataConfig(generate=generate))


def jobs(*texts):
    """Jobs by key, each with the first turn of its prompt."""
    messages = {text: [{"role": "user", "content": text}] for text in texts}
    return {t: Job(Row(t, "s", "f:1", m), 0, 0.0, turns_of(m), list(m)) for t, m in messages.items()}


def locally(config, chatml, ids, finish_reason):
    """What becomes of these tokens of the target: the content of the message, or the reason of the refusal."""
    local = Local(config, chatml)
    answer = SimpleNamespace(ids=ids, finish_reason=finish_reason)
    local.generator = SimpleNamespace(refusal=lambda *_: None, answer=lambda *_: [answer])
    ((_, result),) = local.answers(jobs("hi"))
    if isinstance(result, Refused):
        return str(result)
    assert result.message["tokens"] == result.tokens + (finish_reason == "stop")
    return result.message["content"]


def test_an_answer_cut_inside_a_character_ends_before_it(config, chatml):
    ids = chatml.encode(FOX)
    kept = len(chatml.encode("hello "))
    assert len(ids) > kept + 2
    for end in range(kept + 1, len(ids)):
        assert chatml.decode(ids[:end]).endswith("\ufffd")
        assert locally(config, chatml, ids[:end], "length") == "hello "
    assert locally(config, chatml, ids, "length") == FOX
    assert locally(config, chatml, [*ids[:-1], *chatml.encode("the")], "stop") == BROKEN
    assert locally(config, chatml, ids[:-1], "stop") == BROKEN
    assert locally(config, chatml, chatml.encode("a\ufffdb"), "stop") == "a\ufffdb"
