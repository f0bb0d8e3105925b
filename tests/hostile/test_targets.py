"""A target from the hub, broken: its config.json, its tokenizer, its chat template."""

import json
import resource
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch
from hypothesis import strategies as st
from mutating import UNREADABLE, Acting, cases, documents, outcome, spoil, texts
from planting import replaced
from published_targets import FOLDER
from talking import make_tokenizer

from eagle31_train.common.errors import Refused, UserError
from eagle31_train.compose import load_config
from eagle31_train.config import TargetConfig
from eagle31_train.targets import chat_template
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.derive import planned_drafter
from eagle31_train.targets.description import describe_target, doubts, read_raw, text_config
from eagle31_train.targets.hf import load_model, read_config

CONFIGS = [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*/config.json"))]
assert len(CONFIGS) >= 8
NAMES = ["num_labels", "layer_types", "rope_parameters", "rope_scaling", "text_config", "id2label", "n_layer"]
NAMES += ["sliding_window", "mlp_only_layers", "head_dim", "quantization_config", "configuration_files", "auto_map"]
VALUES = ["llama", "gpt2", "gemma3", "deepseek_v3", "config.json", "full_attention", 4096, 60000]
CONFIG = load_config(["+experiment=any", "target.path=x", "name=x"], resolve=False)
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture
def target(tmp_path_factory):
    """A folder with a tokenizer and a config.json; and how a case's files replace those of the one before."""
    good, folder = tmp_path_factory.mktemp("good"), tmp_path_factory.mktemp("target") / "target"
    make_tokenizer().save_pretrained(good)
    (good / "config.json").write_text(json.dumps(CONFIGS[0]))

    def write(**files):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        for name, data in files.items():
            (folder / name.replace("__", ".")).write_bytes(data)
        return folder

    return write


def described(folder):
    target = TargetConfig(path=str(folder))
    found = describe_target(target)
    text_config(read_raw(target))
    doubts(replace(CONFIG, target=target))
    return planned_drafter(replace(CONFIG, target=target), found, min(8, found.vocab_size))


@cases(texts(documents(CONFIGS, NAMES, VALUES)), quick=120, thorough=10_000)
def test_config_json(case, target):
    outcome(lambda: described(target(config__json=case)))


def test_a_text_models_kind_that_is_no_text_is_refused(target):
    config = {"model_type": "llava", "text_config": {"model_type": ["llama"]}}
    with pytest.raises(UserError, match=r"config\.json is invalid \(model_type: .* valid string"):
        read_raw(TargetConfig(path=str(target(config__json=json.dumps(config).encode()))))


def talked(folder, template=None):
    """All that is done with a tokenizer and a template."""
    config = TargetConfig(path=str(folder), chat_template=template)
    loaded = ChatTemplate.load(config)
    loaded.kept_ids(), loaded.fingerprints(), loaded.check_fits(config, 1 << 20)
    with suppress(Refused):
        loaded.decode(loaded.prompt_ids(ASK))
    return loaded


TOKENIZER = make_tokenizer()
SERIAL = json.loads(TOKENIZER.backend_tokenizer.to_str())
# Few of its letters and merges, or no mistake would fall on anything else.
SERIAL["model"]["vocab"] = {token: i for token, i in SERIAL["model"]["vocab"].items() if i < 12}
SERIAL["model"]["merges"] = []
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": None}
SETTINGS |= {"chat_template": "{{ messages[0]['content'] }}", "model_max_length": 10**30}
SETTINGS |= {"added_tokens_decoder": {"3": {"content": "<|im_end|>", "special": True, "lstrip": False}}}
GENERATION = {"eos_token_id": [1, 2], "temperature": 0.6, "transformers_version": "5.0"}
FILES = {"tokenizer.json": SERIAL, "tokenizer_config.json": SETTINGS, "generation_config.json": GENERATION}
FILES["special_tokens_map.json"] = {"eos_token": {"content": "<|im_end|>", "lstrip": False}}


@st.composite
def tokenizer_files(draw):
    name = draw(st.sampled_from(sorted(FILES)))
    names = ["chat_template", "auto_map", "tokenizer_class", "extra_special_tokens", "additional_special_tokens"]
    return name, draw(texts(documents([FILES[name]], names, ["BertTokenizer", "LlamaTokenizerFast"])))


@cases(tokenizer_files(), quick=20, thorough=3_000)
def test_tokenizer(case, target):
    name, data = case
    files = {key: json.dumps(FILES[key]).encode() for key in ("tokenizer.json", "tokenizer_config.json")} | {name: data}
    outcome(lambda: talked(target(**{key.replace(".", "__"): data for key, data in files.items()})))


# ---------------------------------------------------------------- chat templates


@pytest.fixture
def template_file(target, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    monkeypatch.setattr(chat_template, "MEMORY", 64 << 20)
    folder = target()
    config = TargetConfig(path=str(folder), chat_template=str(folder / "case.jinja"))

    def write(text):
        (folder / "case.jinja").write_text(text, encoding="utf-8")
        return config

    return write


@pytest.mark.parametrize(
    "text",
    [
        "{{",
        "{{ 1 / 0 }}",
        "{{ 2.5 ** 9999 }}",
        "{{ 'a' + 1 }}",
        "{{ messages|unknown }}",
        "{{ messages[99].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10**9)|length }}",
        "{{ raise_exception({}) }}",
        "{{ '\\ud800' }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_a_template_that_fails_refuses_the_conversation(text, template_file):
    template = chat_template.templates_of(template_file(text), TOKENIZER)["default"]
    with pytest.raises(Refused, match=r"^the template refuses the conversation: .") as refused:
        ChatTemplate(TOKENIZER, [2], template).prompt_ids(ASK)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 9**(9**9) }}",
        "{{ 'a' * 10**10 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% set ns = namespace(s=[]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    ],
)
def test_a_template_without_end_is_refused_in_one_line(text, template_file):
    problem = outcome(lambda: ChatTemplate.load(template_file(text)))
    assert "case.jinja takes more than 1 s or 64 MiB" in str(problem)


def test_a_template_is_refused_for_its_memory_alone(template_file, monkeypatch):
    """It is done within the time, and takes more than this process may have left free in its heap."""
    monkeypatch.setattr(chat_template, "SECONDS", 60)
    with pytest.raises(UserError, match="takes more than 60 s or 64 MiB"):
        ChatTemplate.load(template_file("{{ ('a' * 10**9)|length }}"))


def test_a_rendering_that_waits_for_ever_is_ended(monkeypatch):
    """As for a lock that another thread held when it was forked: waiting takes no time of the processor."""
    monkeypatch.setattr(chat_template, "SECONDS", 0)
    monkeypatch.setattr(chat_template, "_try", lambda render: render([]))
    with pytest.raises(UserError, match="to render a few words: set another"):
        chat_template._check_ends(lambda _: Event().wait(), 1, "the template")


def test_every_template_is_tried_with_the_targets_own_variables(template_file):
    endless = "{% if deep %}{{ 'a' * 10**10 }}{% endif %}"
    config, several = template_file(endless), make_tokenizer()
    several.chat_template = {"default": "A", "tool_use": endless}
    for one in (config, replace(config, chat_template=None)):
        assert chat_template.templates_of(one, several)
        with pytest.raises(UserError, match="takes more than 1 s or 64 MiB"):
            chat_template.templates_of(replace(one, template_args={"deep": True}), several)


def test_a_processors_template_is_read_where_the_tokenizer_has_none(template_file, monkeypatch):
    """Also where a template begins as JSON might, and is none."""
    config = template_file('{"chat_template": "A{{ 1 }}"}')
    assert chat_template.templates_of(config, TOKENIZER)["default"] == "A{{ 1 }}"
    (Path(config.path) / "chat_template.json").write_text('{"chat_template": "B"}')
    own = replace(config, chat_template=None)
    without = make_tokenizer()
    without.chat_template = None
    with monkeypatch.context() as patch:

        @replaced(patch, chat_template, "cached_file")
        def of_revision(right, *where, revision, **options):
            return right(*where, **options) if revision == "v2" else None

        assert chat_template.templates_of(replace(own, revision="v2"), without)["default"] == "B"
    assert chat_template.templates_of(own, TOKENIZER)["default"] == TOKENIZER.chat_template
    assert chat_template.templates_of(template_file('{ {"a": 1} }'), TOKENIZER)["default"] == '{ {"a": 1} }'
    for other in ('{"messages": []}', '{"chat_template": 5}', '{"chat_template"'):
        with pytest.raises(
            UserError, match=r"case\.jinja cannot be read .*: set target\.chat_template to a Jinja file"
        ):
            chat_template.templates_of(template_file(other), TOKENIZER)


def test_a_switch_given_as_text_is_refused_unless_the_template_compares_with_that_text(template_file):
    text = "{% if thinking %}hm{% endif %}{{ 'x' if mode == 'off' }}{{ 1 if not brief and fast else country }}"
    text += "{% if deep is defined and deep is false %}{% endif %}{% if (long) %}{% endif %}{{ wide and 'x' }}"
    template = ChatTemplate.load(
        template_file(text + "{% set t = high|default(true) %}{% if low is sameas false %}{% endif %}")
    )
    for name, value in [
        ("thinking", "no"),
        ("thinking", "False"),
        ("brief", "yes"),
        ("fast", "No"),
        ("deep", "false"),
        *((name, "false") for name in ("long", "wide", "high", "low")),
    ]:
        assert template.switch_as_text({name: value}) == name
        with pytest.raises(Refused, match=f"{name}='{value}' is text"):
            template.under({name: value})
    for args in ({"mode": "off"}, {"thinking": False}, {"thinking": "high"}, {"country": "NO"}):
        assert template.switch_as_text(args) is None
        template.under(args)


def test_a_template_without_end_is_refused_under_a_lower_limit_of_memory(template_file, monkeypatch):
    there = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (there + 2**24, there + 2**24))  # `ulimit -v`
    with pytest.raises(UserError, match="to render a few words"):
        ChatTemplate.load(template_file("{{ 'a' * 10**10 }}"))


def test_a_template_reaches_neither_python_nor_files(template_file, tmp_path):
    config = template_file(f"{{{{ cycler.__init__.__globals__.os.mkdir('{tmp_path}/made') }}}}hi")
    with suppress(UserError, Refused):
        ChatTemplate.load(config).prompt_ids(ASK)
    assert not (tmp_path / "made").exists()


# ---------------------------------------------------------------- code of a target's own


def test_a_targets_pickle_runs_nothing(target, tmp_path):
    folder = target()
    torch.save(Acting(tmp_path / "made"), folder / "pytorch_model.bin")
    config = TargetConfig(path=str(folder), device="cpu", dtype="float32")
    assert isinstance(outcome(lambda: load_model(config)), UserError)
    assert not (tmp_path / "made").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "made").exists(), "it would have"


def test_a_targets_python_code_runs_only_where_that_is_allowed(target, tmp_path):
    code = f"import os\nos.makedirs({str(tmp_path / 'made')!r}, exist_ok=True)\n"
    code += "from transformers import LlamaConfig\nclass Own(LlamaConfig): pass\n"  # marked for good when loaded
    own = {**CONFIGS[0], "model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    folder = target(config__json=json.dumps(own).encode(), own__py=code.encode())
    config = TargetConfig(path=str(folder), device="cpu", dtype="float32")
    for call in (lambda: read_config(config), lambda: load_model(config)):
        assert "target.trust_remote_code=true" in str(outcome(call))
    outcome(lambda: describe_target(config))
    outcome(lambda: ChatTemplate.load(config))
    assert not (tmp_path / "made").exists()
    outcome(lambda: read_config(replace(config, trust_remote_code=True)))
    assert (tmp_path / "made").exists(), "it would have"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_links_to_nowhere_and_to_what_never_ends(name, kind, target):
    folder = target()
    spoil(folder / name, kind)
    config = TargetConfig(path=str(folder))
    assert isinstance(outcome(lambda: ChatTemplate.load(config)), UserError)
    if name == "config.json":
        assert isinstance(outcome(lambda: describe_target(config)), UserError)


def test_a_folder_in_the_place_of_a_config_is_named(target):
    folder = target()
    spoil(folder / "config.json", "folder")
    assert "config.json" in str(outcome(lambda: describe_target(TargetConfig(path=str(folder)))))
