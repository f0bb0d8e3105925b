"""The model card: its facts, its escaping, and commands that repeat the run."""

import json
import shlex
from dataclasses import replace

import pytest
import yaml

from eagle31_train import card, export
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


def test_acceptance_is_told_where_it_was_measured(run):
    run.measure()
    export.export(run.config())
    body = run.exported()[2]
    assert "| acceptance length (accepted + 1 per verification) | 1.812 |" in body
    assert "| acceptance at each depth | 0.500, 0.250, 0.062 |" in body
    assert "| tokens per second, speculative | 44.0 |" in body
    assert "| machine | a \\| machine |" in body
    assert "acceptance of this checkpoint was not measured" not in body
    assert "Intervals, other numbers of draft tokens, other prompts, and drift were not measured." in body
    assert "How fast vLLM is with this checkpoint was not measured." in body
    assert "This checkpoint was not compared with others." in body


def test_every_source_that_was_measured_has_a_row_and_the_others_are_named(run):
    run.measure()
    manifest = json.loads((run.folder / "evaluate" / "manifest.json").read_text())
    shares = {"prompts": 2, "drafts": 4, "acceptance_length": 2.25, "acceptance_at_depth": [0.75, 0.5]}
    nothing = {"prompts": 1, "drafts": 0, "acceptance_length": None, "acceptance_at_depth": [None, None]}
    manifest["report"] |= {"by_source": {"chat|zh": shares, "short": nothing}, "not_measured": ["agent"]}
    (run.folder / "evaluate" / "manifest.json").write_text(json.dumps(manifest))
    export.export(run.config())
    body = run.exported()[2]
    assert "| source | prompts | drafts | acceptance length | at each depth |" in body
    assert "| chat\\|zh | 2 | 4 | 2.250 | 0.750, 0.500 |" in body
    assert "| short | 1 | 0 | – | –, – |" in body
    assert "Not measured, since none of its prompts was decoded: agent." in body


@pytest.mark.parametrize("measured", ["nothing", "another checkpoint"])
def test_acceptance_is_not_claimed_otherwise(measured, run):
    if measured == "another checkpoint":
        run.measure(train_fingerprint="0" * 16)
    export.export(run.config())
    assert "The acceptance of this checkpoint was not measured." in run.exported()[2]


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
