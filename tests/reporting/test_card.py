"""The model card: its facts, its escaping, and commands that repeat the run."""

import shlex

import pytest
import yaml
from huggingface_hub import ModelCardData
from plan_cases import shape_of
from sample_results import alone, comparison, serving

from eagle31_train.common.locations import ROOT
from eagle31_train.compose import load_config
from eagle31_train.evaluation.intervals import bracket
from eagle31_train.reporting import card, markdown, recipe
from eagle31_train.reporting.card import CardResult, CardResults


def rendered(*options, results=None, more=None, **shape):
    train = {"inputs": {"train": {"lr": 0.001}}, "tokens": 12345, "left_out": [3, 4, 9], "heldout": {"tau": 1.5}}
    train |= more or {}
    data = {"coverage": 0.975, "refused": [{"where": "/home/me/x.jsonl:3"}], "files": {}}
    config = load_config(["+experiment=smollm2", *options])
    text = card.render(config, shape_of(**shape), train, data, results or CardResults())
    _, head, body = text.split("---\n", 2)
    assert "/home/me" not in text
    return yaml.safe_load(head), body


def shows(body, *words):
    assert [one for one in words if one not in body] == []


def test_the_card_tells_what_it_is():
    head, body = rendered("repo=me/my-draft", "target.path=someone/a-target")
    assert head == {
        "base_model": "someone/a-target",
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "eagle-3.1", "speculative-decoding", "vllm"],
    }
    options = '{"method": "eagle3", "model": "me/my-draft", "num_speculative_tokens": 3}'
    shows(
        body,
        "# EAGLE 3.1 drafter for someone/a-target",
        f"vllm serve someone/a-target --speculative-config '{options}'\n",
        "```sh\nvllm serve someone/a-target\n```",
        "The acceptance of this checkpoint was not measured.",
        "| heldout.acceptance\\_estimate | 1.5 |",
        "| left\\_out | 3 |",
        "| draft\\_vocab\\_size | 1000 |",
        "## Licence\n\nNone is stated",
    )
    assert "q\\_lora\\_rank" not in body


def test_the_card_says_that_its_command_trains_further_than_a_training_that_was_ended():
    assert "ended at step" not in rendered(more={"steps": 40})[1]
    shows(rendered(more={"steps": 12, "planned": 40})[1], "ended at step 12 of the 40 that this command trains.\n\n```")


def test_the_card_says_which_training_pipeline_parallelism_needs():
    for shared in (True, False):
        assert ("drafter.share\\_embedding=false" in rendered(share_embedding=shared)[1]) is shared


def test_the_card_of_a_parallel_drafter_serves_it_as_one():
    head, body = rendered("drafter.parallel=true", parallel=True, ptd_token_id=9)
    assert "eagle-3.1" in head["tags"]
    shows(body, "# EAGLE 3.1 drafter, drafting in parallel, for ", "| ptd\\_token\\_id | 9 |")
    shows(body, '"num_speculative_tokens": 3, "parallel_drafting": true}', "drafts in parallel only on its V1 runner")


def test_the_metadata_names_data_sets_of_the_hub_and_is_what_the_hub_takes():
    head, _ = rendered("repo=me/d", "data.prompts=a/b.jsonl", "data.sources={x:{path:c/d},y:e/f}", "target.path=g/h")
    assert head["datasets"] == ["c/d", "e/f"]
    assert ModelCardData(**head, ignore_metadata_errors=False).to_dict() == head


def test_the_card_says_how_the_drafter_was_made_smaller():
    _, body = rendered("export_sliding_window=64", "export_vocab_size=500")
    shows(body, "500 draft tokens were kept", "limited to the last 64 positions", "export_vocab_size=500")


def test_results_are_told_once_and_with_their_pictures_folders_of_the_machine_are_not():
    result, compared = alone(), {**comparison(), "identities": {"A": ["1"], "B": ["2"]}}
    report = {"identical": True, "not_measured": ["agent"]}
    ours, comparisons = CardResult({"report": report, "result": result}), [CardResult(compared, names=["B"])]
    _, body = rendered(results=CardResults(ours, CardResult({"serving": serving()}), comparisons))
    length = bracket(result["workloads"][0]["drafters"]["B"]["by_depth"]["3"]["acceptance_length"])
    shows(
        body,
        f"**Acceptance length {length} with 3 draft tokens**,\non 12 prompts of heldout, greedy.",
        "Every answer that was decoded with the drafter was equal to the target's own.",
        "none of its prompts was decoded: agent.",
        "a \\| processor, float32, at most 128 tokens per answer:\n\n```sh\npython -m stage x=/path/to/p.jsonl",
        "- see /path/to/notes",
        "<details>\n<summary>heldout · x</summary>",
        "Here this checkpoint is called B.",
        "| a\\|b\\<c\\> | 6 | ",
    )
    assert body.count("1.0 is no gain. \\[low, high\\]: 95 % interval over five or more prompts.") == 1


OWN = ["+experiment=any", "target.path=Qwen/Qwen3-4B", "name=own"]


@pytest.mark.parametrize(
    "options",
    [
        ["+experiment=smollm2"],
        [*OWN, "regenerate=true", "data.prompts=self", "train.epochs=2"],
        ["+experiment=qwen3_8b", "data.prompts='a b, c=d.jsonl'", "data.split='007'", "data.draft_vocab_size=null"],
        ["+experiment=kimi", "drafter.rope_scaling={factor:4.0}", "run_dir=elsewhere/x", "name='true'"],
        ["+experiment=kimi_toy", "~drafter.rope_scaling.beta_fast"],
        ["+experiment=smollm2", "data.conversations=null", "data.prompts=null", "regenerate=false"],
        [*OWN, "data.conversations=c.jsonl"],
        [*OWN, "data.sources.a.path=a.jsonl", "regenerate=true"],
        ["+experiment=llama31_8b", "data.prompts=p.jsonl", "regenerate=false"],
        ["+experiment=smollm2", r"data.split='back\\slash \\\'quote\' end\\\\'"],
        ["+experiment=smollm2", "name='my (run)=1~ größe </b'", "run_dir=~x/</details>"],
        ["+experiment=smollm2", 'data.conversations="it\'s \\\\ here"', f"data.prompts={ROOT}/README.md"],
    ],
)
def test_the_options_on_the_card_give_the_same_configuration(options):
    config = load_config(options)
    again = load_config(shlex.split(markdown.scrubbed(recipe.command("eagle31 data", config)))[2:])
    assert recipe.overrides(config)[0] == options[0]
    if config.data.prompts and str(ROOT / "README") in config.data.prompts:
        assert again.data.prompts == "README.md"
        again.data.prompts = config.data.prompts
    assert again == config
