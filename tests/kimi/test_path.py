"""The whole path of Kimi's drafter at toy size, by the commands that a user types: from prompts to the export.

A target of Kimi's kind thinks, is asked in several languages and with tools, and learns to draft from its own
answers.
"""

import json

import pytest
import speaking

from eagle31_train.targets import toy


@pytest.mark.slow
def test_the_recipe_trains_a_drafter_by_the_commands_that_a_user_types(tmp_path, capsys):
    words = ["+experiment=kimi_toy", f"target.path={toy.make(tmp_path / 'toy')}", "train.wandb=disabled"]
    run = speaking.run_stages(tmp_path, *words) / "kimi_toy"
    data, evaluated = (json.loads((run / name / "manifest.json").read_text()) for name in ("data", "evaluate"))
    assert data["refused"] == []
    assert "REFUSED" not in capsys.readouterr().out
    sources = {**data["splits"]["train"]["by_source"], **data["splits"]["heldout"]["by_source"]}
    assert sources.keys() == {"agent", "chat", "chinese"}
    rows = [json.loads(line) for line in (run / "conversations.jsonl").read_text().splitlines()]
    answers = [m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant"]
    assert answers
    assert all(answer.count("</think>") == 1 for answer in answers if len(answer.split()) > 50)
    assert data["no_end_of_turn"] < len(answers) / 2  # most end by themselves, and are learnt to
    assert evaluated["identical"]
    (numbers,) = evaluated["result"]["workloads"][0]["drafters"].values()
    assert numbers["by_depth"][str(evaluated["result"]["draft_tokens"])]["acceptance_length"][0] > 2
    config = json.loads((run / "export" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("kimi_k2", ["Eagle3DeepseekV2ForCausalLM"])
