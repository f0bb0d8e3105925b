"""vLLM's own parsers read in what is learnt the messages that it was made of."""

import json

import pytest
from families import FAMILIES, load, row_of

from data_prep.turn import read_turn
from eagle31_train.targets.markup import Parts, apart, meant

pytestmark = pytest.mark.vllm

PARSERS = {"kimi": "kimi", "qwen3": "hermes", "llama3": "llama"}


@pytest.fixture(scope="module")
def turns(tmp_path_factory):
    """Every answer of the golden cases: its name, what it means, and what vLLM is asked of it."""
    found = []
    for family, parser in PARSERS.items():
        folder = str(tmp_path_factory.mktemp(family))
        load(FAMILIES[family], {}).tokenizer.save_pretrained(folder)
        for case in FAMILIES[family]["cases"]:
            template, row = load(FAMILIES[family], case.get("args", {})), row_of(case)
            for i, message in enumerate(row.messages):
                if message["role"] != "assistant" or (parser != "kimi" and not message.get("tool_calls")):
                    continue  # the others' parsers are of calls alone
                text = read_turn(template, row.messages[: i + 1], row.tools).answer.content
                tools = row.tools or (
                    [{"type": "function", "function": {"name": "find"}}] if parser != "kimi" else None
                )
                asked = {
                    "parser": parser,
                    "tokenizer": folder,
                    "text": text,
                    "args": template.template_args,
                    "tools": tools,
                }
                found.append((f"{family}: {case['name']}, turn {i}", meant(apart(message)), asked))
    return found


def test_vllm_reads_what_was_meant(turns, ask):
    assert len(turns) > 15
    read = ask("text", [asked for _, _, asked in turns])
    for (name, means, asked), (thought, content, calls) in zip(turns, read, strict=True):
        seen = Parts((thought or "").strip(), (content or "").strip(), [(n, json.loads(given)) for n, given in calls])
        if asked["parser"] == "kimi":
            assert means.difference(seen) is None, name
        else:
            assert Parts(calls=means.calls).difference(Parts(calls=seen.calls)) is None, name
