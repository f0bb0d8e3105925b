"""The model card: its facts, its escaping, and commands that repeat the run."""

import json
import shlex
from dataclasses import replace

import pytest
import torch
import yaml

from eagle31_train import artifacts, card, export
from eagle31_train.cli import ROOT, load_config
from eagle31_train.markdown import scrubbed


def front_matter(text):
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_card_tells_what_it_is(run):
    export.export(run.config("repo=me/my-draft"))
    head, body = front_matter(run.exported()[2])
    assert head == {
        "base_model": "someone/a-target",
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "eagle-3.1", "speculative-decoding", "vllm"],
    }
    assert "# EAGLE 3.1 drafter for someone/a-target" in body
    options = '{"method": "eagle3", "model": "me/my-draft", "num_speculative_tokens": 3}'
    assert f"vllm serve someone/a-target --speculative-config '{options}'\n" in body
    assert "serve without `--speculative-config`" in body
    assert "```sh\nvllm serve someone/a-target\n```" in body
    assert "| conversations.train | 321 |" in body
    assert "| coverage | 0.975 |" in body
    assert "| train.lr | 0.001 |" in body
    assert "| tokens | 12345 |" in body
    assert "| draft\\_vocab\\_size | 12 |" in body
    assert "## Licence\n\nNone is stated" in body
    assert "| refused | 1 |" in body
    assert "/home/me" not in body
    assert str(run.folder) not in body


@pytest.mark.parametrize("trained", ["never measured", "of other inputs", "again, to other weights"])
def test_acceptance_is_not_claimed_otherwise(trained, run, capsys):
    if trained != "never measured":
        run.evaluate()
        export.export(run.config())
        assert "acceptance of this checkpoint was not measured" not in run.exported()[2]
        assert capsys.readouterr().out.count("is of other weights") == 0
    file = run.folder / "train" / "manifest.json"
    if trained == "of other inputs":
        artifacts.write_json(file, {**artifacts.read_json(file, ""), "fingerprint": "0" * 16})
    if trained == "again, to other weights":
        run.change_tensors(norm__weight=torch.full((16,), 0.5))
        assert artifacts.read_json(file, "")["fingerprint"] == "e" * 16
    export.export(run.config("overwrite=true"))
    assert "The acceptance of this checkpoint was not measured." in run.exported()[2]
    told = f"{run.folder}/evaluate is of other weights or an earlier version, and not on the card: run `python -m"
    assert capsys.readouterr().out.count(told) == (trained != "never measured")


def test_a_local_target_is_named_without_its_path_and_links_nowhere(run, tmp_path):
    local = tmp_path / "secret-place" / "my | target"
    local.mkdir(parents=True)
    export.export(run.config(f"target.path='{local}'"))
    config, _, text = run.exported()
    head, body = front_matter(text)
    assert "base_model" not in head
    assert "drafter for my \\| target" in body
    assert config["target_model_name"] == "my | target"
    assert "vllm serve '/path/to/my | target' --spec" in body
    assert "secret-place" not in text + json.dumps(config)


def test_eagle_3_is_not_called_3_1(run, tiny):
    facts = card.Facts(run.config(), replace(tiny, fc_norm=False, norm_output=False), {}, None)
    head, body = front_matter(card.render(facts))
    assert "eagle-3.1" not in head["tags"]
    assert "# EAGLE 3 drafter" in body
    half = replace(facts, shape=replace(tiny, fc_norm=False))
    assert "# EAGLE 3 with norm_output drafter" in card.render(half)


def test_the_serving_command_survives_a_shell():
    config = load_config(["+experiment=smollm2", "evaluate.draft_tokens=5"])
    config.target.path = "/models/it's here"
    command = shlex.split(card.serve_command(config, "me/draft"))
    assert command[:4] == ["vllm", "serve", "/models/it's here", "--speculative-config"]
    assert json.loads(command[4]) == {"method": "eagle3", "model": "me/draft", "num_speculative_tokens": 5}
    assert len(command) == 5


def test_a_target_is_served_with_what_it_needed_before():
    engine = ["extract.engine=vllm", "+extract.engine_args={tensor_parallel_size:8,max_model_len:4096}"]
    config = load_config(["+experiment=smollm2", "target.trust_remote_code=true", *engine])
    command = card.serve_command(config, None, published=True)
    assert command.endswith("SmolLM2-135M-Instruct --trust-remote-code --tensor-parallel-size 8")
    config.extract.engine = "transformers"
    assert "tensor-parallel" not in card.serve_command(config, None)


@pytest.mark.parametrize(
    "options",
    [
        ["+experiment=smollm2"],
        ["+experiment=smollm2", "drafter.norm_output=false", "drafter.fc_norm=false", "train.lr=3e-4"],
        ["+experiment=qwen3_8b", "data.prompts='a b, c=d.jsonl'", "data.split='007'", "data.draft_vocab_size=null"],
        ["+experiment=llama31_8b", "train.betas=[0.9,0.99]", "target.aux_layers=[1,2,3]", "name='true'"],
        ["+experiment=kimi", "drafter.rope_scaling={factor:4.0}", "run_dir=elsewhere/x"],
        ["+experiment=kimi_toy", "~drafter.rope_scaling.original_max_position_embeddings"],
        ["+experiment=smollm2", r"data.split='back\\slash \\\'quote\' end\\\\'"],
        ["+experiment=smollm2", 'data.conversations="it\'s \\\\ here"', f"data.prompts={ROOT}/README.md"],
    ],
)
def test_the_options_on_the_card_give_the_same_configuration(options):
    config = load_config(options)
    again = load_config(card.overrides(config))
    if config.data.prompts and str(ROOT / "README") in config.data.prompts:
        assert again.data.prompts == "README.md"
        again.data.prompts = config.data.prompts
    assert again == config


def test_the_options_on_the_card_are_few_and_tell_no_folder():
    config = load_config(["+experiment=smollm2", "run_dir=/home/me/run", "data.prompts=/home/me/p.jsonl", "seed=4"])
    assert card.overrides(config) == ["+experiment=smollm2", "seed=4", "data.prompts=/path/to/p.jsonl"]
    assert card.commands(config)[0] == "python -m data_prep +experiment=smollm2 seed=4 data.prompts=/path/to/p.jsonl"
    elsewhere = load_config(["+experiment=smollm2", "store_dir=file:///home/me/store"])
    assert card.overrides(elsewhere) == ["+experiment=smollm2", "store_dir=file:///path/to/store"]
    assert scrubbed("--x=file:///home/me/store, s3://b/c") == "--x=file:///path/to/store, s3://b/c"
    assert [line.split(" +")[0] for line in card.commands(config)] == [
        "python -m data_prep",
        "python -m eagle31_train.extract",
        "accelerate launch --quiet train.py",
        "python -m eagle31_train.evaluate",
        "python -m eagle31_train.export",
    ]
