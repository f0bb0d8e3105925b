"""The library as README.md and docs/api.md show it, on an earlier version's run; its counts beside an evaluation."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from made import message_of
from omegaconf import OmegaConf
from planting import watched
from safetensors.torch import load_file, save_file

from eagle31_train.api import Speculator, open_store
from eagle31_train.evaluation.decoding import Limits, decode_plain
from eagle31_train.model.decode import DraftDecoder

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests" / "fixtures" / "v68c343f"
PAGES = (ROOT / "README.md").read_text() + (ROOT / "docs" / "api.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the run and the target that the page speaks of."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "models").mkdir()
    shutil.copytree(FIXTURE / "run", tmp_path / "runs" / "smollm2")
    (tmp_path / "models" / "SmolLM2-135M-Instruct").symlink_to(FIXTURE / "target")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def speculator(folder):
    return Speculator.load("runs/smollm2", target="models/SmolLM2-135M-Instruct", device="cpu")


@pytest.mark.parametrize("block", BLOCKS)
def test_the_page_runs_as_it_stands(block, folder, capsys):
    exec(block, {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_states_are_the_stores(folder):
    store = open_store("runs/smollm2/store")
    sample, document = store.sample("train", 1), store.store.split("train").read(1)
    assert sample.aux.shape == (document.attended, len(store.aux_layers), store.store.states["hidden_size"])
    assert sample.last.shape == (len(sample.supervised), store.store.states["hidden_size"])
    assert sample.aux.dtype == torch.bfloat16
    assert torch.equal(sample.supervised, document.loss_mask[2:].nonzero()[:, 0] + 1)
    assert "heldout and train, and none named 'test'" in message_of(store.count, "test")


def test_counts_are_the_evaluators(speculator, monkeypatch):
    """Prompt for prompt the evaluation that the earlier version has written down, and the target's own output."""
    recorded = json.loads((FIXTURE / "run" / "evaluate" / "manifest.json").read_text())
    assert speculator.ends == recorded["end_ids"]
    report, prompts = recorded["report"], recorded["per_prompt"]
    read = watched(monkeypatch, DraftDecoder, "extend")
    for prompt in prompts:
        answer = speculator.generate(prompt["prompt_ids"], report["draft_tokens"], report["max_new_tokens"])
        assert (answer.tokens, answer.accepted) == (prompt["output_ids"], prompt["accepted"])
        limits = Limits(report["max_new_tokens"], speculator.ends)
        assert decode_plain(speculator.target, [prompt["prompt_ids"]], limits)[0].tokens == answer.tokens
        assert answer.text.endswith(("and", "again")), "and no end token, which is the last one"
        assert answer.acceptance_length == pytest.approx(len(answer.tokens) / len(answer.accepted))
        read.clear()
        drafted, count = speculator.draft(prompt["prompt_ids"], 3), answer.accepted[0]
        speculator.generate(prompt["prompt_ids"], 3)
        assert torch.equal(read[0][2], read[1][2]), "the drafter reads the same"
        agree = [ours == theirs for ours, theirs in zip(drafted, answer.tokens[1:], strict=False)]
        assert [*agree, False].index(False) == count, "what it drafts is what is accepted"
    score = speculator.score([p["prompt_ids"] for p in prompts], report["draft_tokens"], report["max_new_tokens"])
    assert score["acceptance_length"][0] == pytest.approx(report["acceptance_length"])
    accepted = [count for p in prompts for count in p["accepted"]]
    shares = [sum(count >= k for count in accepted) / len(accepted) for k in range(1, report["draft_tokens"] + 1)]
    assert score["acceptance_at_depth"] == pytest.approx(shares)
    assert (score["prompts"], score["tokens"]) == (len(prompts), sum(len(p["output_ids"]) for p in prompts))
    cut = speculator.score([p["prompt_ids"] for p in prompts], report["draft_tokens"], max_new_tokens=3)
    assert cut["acceptance_length"][0] == pytest.approx(1 + sum(cut["acceptance_at_depth"])), "nor of what is cut off"
    nothing = speculator.score([p["prompt_ids"] for p in prompts], 2, max_new_tokens=1)
    assert (nothing["acceptance_length"], nothing["acceptance_at_depth"]) == ([None] * 3, [None] * 2), "no draft"
    assert shares[0] > 0


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
def test_a_runs_weights_are_those_that_are_served(folder, own):
    """As the exporter writes them, in the target's dtype; and run in the one that is asked for."""
    config = Path("runs/smollm2/train/config.yaml")
    changed = OmegaConf.load(config)
    changed.target.dtype = own
    OmegaConf.save(changed, config)
    weights = Speculator.load("runs/smollm2", target="models/SmolLM2-135M-Instruct", device="cpu").drafter.fc.weight
    assert weights.dtype == torch.float32
    assert torch.equal(weights.bfloat16().float(), weights) == (own == "bfloat16")


@pytest.mark.parametrize(
    ("drafter", "other", "said"),
    [
        ("runs/smollm2", "other", "was trained for target, but target.path is other:"),
        ("runs/smollm2/export", "its/target", "was trained for another target than target.path=its/target:"),
    ],
)
def test_another_target_of_the_same_size_is_refused(folder, tmp_path, drafter, other, said):
    shutil.copytree(FIXTURE / "target", tmp_path / other)
    weights = load_file(tmp_path / other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, tmp_path / other / "model.safetensors")
    assert said in message_of(Speculator.load, drafter, target=other)


def test_a_longropes_answers_end_where_its_tables_change(folder):
    """Past the short contexts a verification would read other keys than plain decoding."""
    shutil.copytree("runs/smollm2/export", "draft")  # of no run, which would know its target
    shutil.copytree(FIXTURE / "target", "long")
    config = json.loads(Path("long/config.json").read_text())
    half = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]) // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 40, **factors}
    Path("long/config.json").write_text(json.dumps({**config, "rope_scaling": rope, "rope_parameters": rope}))
    speculator = Speculator.load("draft", target="long", device="cpu")
    assert speculator.longest == 40
    assert len(speculator.generate([1, 2, 3], 3, max_new_tokens=100).tokens) <= 40 - 3


def test_answers_end_at_any_end_token_and_where_the_drafter_has_no_position(folder):
    shutil.copytree("runs/smollm2/export", "draft")
    shutil.copytree(FIXTURE / "target", "own")
    settings = json.loads(Path("own/generation_config.json").read_text())
    prompt, config = [5, 6, 7], json.loads(Path("draft/config.json").read_text())
    for scaling, longest in ((None, 40), ({"rope_type": "linear", "factor": 2.0}, 80)):
        changed = {"max_position_embeddings": 40, "rope_scaling": scaling, "rope_parameters": None}
        Path("draft/config.json").write_text(json.dumps({**config, **changed}))
        speculator = Speculator.load("draft", target="own", device="cpu")
        assert speculator.longest == longest
    answer = speculator.generate(prompt, 3, max_new_tokens=8)
    ends = [*speculator.ends, answer.tokens[1]]
    Path("own/generation_config.json").write_text(json.dumps({**settings, "eos_token_id": ends}))
    speculator = Speculator.load("draft", target="own", device="cpu")
    assert sorted(speculator.ends) == sorted(ends)
    assert speculator.generate(prompt, 3, max_new_tokens=8).tokens == answer.tokens[:2]


def test_copies_of_a_store_elsewhere_are_where_they_are_asked_for(folder):
    local, there = Path("runs/smollm2/store"), fsspec.filesystem("memory")
    there.put(str(local), "/api/store", recursive=True)
    sample = open_store("memory://api/store", folder / "copies", 10**8).sample("train", 1)
    there.rm("/api", recursive=True)
    assert torch.equal(sample.aux, open_store(local).sample("train", 1).aux)
    assert list((folder / "copies").rglob("*.safetensors"))
    assert not (folder / "store-cache").exists()


def test_what_cannot_be_decoded_is_said(speculator):
    """Beyond its positions a target still computes something, which no server would."""
    speculator.ends = []
    assert len(speculator.generate([5] * (speculator.longest - 8), 3, 64).tokens) == 5
    for prompt, drafted, written, message in [
        ([5] * (speculator.longest - 3), 3, 6, "leave no room for an answer"),
        ([speculator.target.embedding.weight.shape[0]], 3, 4, "the prompt has token"),
        ([-1], 3, 4, "the prompt has token"),
        ([5, {"role": "user", "content": "x"}], 3, 4, "no mixture"),
        ({"role": "user", "content": "x"}, 3, 4, "no mixture"),
        ([5.0], 3, 4, "no mixture"),
        ([], 3, 4, "the prompt has no tokens"),
        ([{"role": "user"}], 3, 4, "cannot be rendered: a turn of role user without text"),
        ("\ud800", 3, 4, "cannot be rendered: "),
        (torch.tensor([[5], [6]]), 3, 4, "no mixture"),
        ([True, False], 3, 4, "no mixture"),
        (b"why", 3, 4, "no mixture"),
        (None, 3, 4, "no mixture"),
        ("why", 0, 4, "num_speculative_tokens=0 must be a whole number of at least 1"),
        ("why", 2.0, 4, "num_speculative_tokens=2.0 must be"),
        ("why", 3, 0, "max_new_tokens=0 must be"),
        ("why", 3, "8", "max_new_tokens='8' must be"),
    ]:
        assert message in message_of(speculator.generate, prompt, drafted, written)
    assert "count=1.5 must be" in message_of(speculator.draft, "why", 1.5)
    # Of a text the letters, of a row the columns' names would be decoded in silence.
    for prompts in ("why is", [], [5, 6], np.array([5, 6]), {"prompt": "why"}, iter([]), None):
        assert "needs a list with at least one prompt" in message_of(speculator.score, prompts)


def test_options_that_the_target_lacks_are_refused(folder):
    load = partial(Speculator.load, "runs/smollm2", "models/SmolLM2-135M-Instruct")
    assert "trust_remote_code" in message_of(load, max_positions=9)
    assert "template_args: " in message_of(load, template_args="thinking")
    speculator = load(dtype=torch.float32, device=torch.device("cpu"))
    for prompts in (iter(["why", "how"]), np.array(["why", "how"])):
        assert speculator.score(prompts, max_new_tokens=3)["prompts"] == 2


def test_prompts_are_under_the_runs_own_template(folder):
    (folder / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}")
    file = folder / "runs" / "smollm2" / "train" / "config.yaml"
    config = OmegaConf.load(file)
    config.target.update(chat_template="mine.jinja", template_args={"mark": "!"})
    OmegaConf.save(config, file)
    load = partial(Speculator.load, "runs/smollm2", target=Path("models", "SmolLM2-135M-Instruct"), device="cpu")
    assert "dtype='None' is not one of" in message_of(load, dtype=None)
    messages = [{"role": "user", "content": "why"}]
    template = load().template
    assert template.decode(template.prompt_ids(messages)) == "why!"
    given = load(template_args={"mark": "?"}).template
    assert given.decode(given.prompt_ids(messages)) == "why?"


def test_a_text_is_what_a_user_says(speculator):
    assert speculator.template.decode(speculator.ids("why")).startswith("<|im_start|>user\nwhy<|im_end|>")


def test_token_ids_of_arrays_and_tensors_are_token_ids(speculator):
    """Left out in silence, they would make another prompt of it."""
    arrays = np.array([5, 6, 7]), torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7]])
    for given in (*arrays, [5, *np.array([6, 7])], [5, *torch.tensor([6, 7])]):
        assert repr(speculator.ids(given)) == "[5, 6, 7]"
