"""Up to date means: made from the wanted inputs, and every file as it was written, whole or not at all."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from made import message_of

from eagle31_train import provenance
from eagle31_train.common import artifacts
from eagle31_train.compose import load_config
from eagle31_train.config import Config
from eagle31_train.provenance import Provenance

pytestmark = pytest.mark.core
INPUTS = {"data": "abc", "train": {"lr": 0.1, "betas": [0.9, 0.95]}}


def up_to_date(folder, inputs=INPUTS, overwrite=False):
    return provenance.up_to_date(folder, Provenance(inputs), overwrite)


def test_only_a_whole_output_of_the_same_inputs_is_up_to_date_and_another_is_refused_or_made_anew(tmp_path):
    out, other = tmp_path / "out", {"data": "abc", "train": {"lr": 0.2, "betas": [0.9, 0.95]}}
    assert not up_to_date(out)
    artifacts.write_text(out / "a", "one")
    record = Provenance(INPUTS).record(files=artifacts.list_files(out, [out / "a"]))
    artifacts.write_json(out / artifacts.MANIFEST, record)
    said = message_of(up_to_date, out, other)
    assert said.startswith(str(out))
    assert "train.lr: 0.1 there, 0.2 here): use the same inputs again, choose another name=" in said
    assert not up_to_date(out, other, overwrite=True)
    assert (out / "a").exists(), "it goes when there is something in its place"
    assert up_to_date(out)
    assert up_to_date(out, {"train": {"betas": [0.9, 0.95], "lr": 0.1}, "data": "abc"}), "in any order"
    (out / artifacts.MANIFEST).unlink()
    assert not up_to_date(out)


def inputs_of(*options, chosen_on=None):
    config = load_config(["+experiment=smollm2", *options])
    return provenance.of_training(config, "s", "d", "v" * 64, None, chosen_on)


def test_inputs_of_training_are_what_steers_its_weights():
    """And what chooses the step, only where one is chosen: runs from before there were such options stay up to date."""
    record = inputs_of().record()
    assert inputs_of("train.wandb=disabled", "train.time_limit=1h", "train.num_workers=4").matches(record)
    assert not inputs_of("train.lr=1").matches(record)
    assert not inputs_of("seed=9").matches(record)
    assert not {"keep_best", "early_stop", "choice"} & inputs_of("train.eval_every=7").inputs["train"].keys()
    choosing = inputs_of("train.early_stop=3", "train.eval_every=7", chosen_on=["prompt"]).inputs["train"]["choice"]
    steps = {"keep_best": False, "early_stop": 3, "prompts": ["prompt"], "every": 7}
    assert choosing == {**steps, "dtype": "float32", "draft_tokens": 3}
    # Without decay all is as it was before only the maps decayed.
    assert "decays" not in inputs_of("train.weight_decay=0").inputs["train"]
    assert inputs_of("train.weight_decay=0.1").inputs["train"]["decays"] == "maps"


@pytest.mark.parametrize("before", ["0", "1"])
def test_another_weight_decay_is_not_taken_for_that_of_an_earlier_version(before):
    record = inputs_of(f"train.weight_decay={before}").record()
    after = inputs_of(f"train.weight_decay={1 - int(before)}")
    said = message_of(after.refuse_other, "run", record, overwrite=False)
    assert f"(train.weight_decay: {before}.0 there, {1 - int(before)}.0 here)" in said
    earlier = {**record["inputs"], "train": {**record["inputs"]["train"], "weight_decay": 1.0}}
    earlier["train"].pop("decays", None)
    said = message_of(inputs_of("train.weight_decay=1").refuse_other, "run", {"inputs": earlier}, overwrite=False)
    assert "an earlier version also decayed lm_head, this one only linear layers" in said


def test_what_chooses_a_step_is_named_as_the_user_sets_it():
    wanted = inputs_of("evaluate.num_speculative_tokens=5", "train.keep_best=true", chosen_on=["prompt"])
    other = inputs_of("train.keep_best=true", chosen_on=["prompt"]).record()
    said = message_of(wanted.refuse_other, "run", other, overwrite=False)
    assert "(evaluate.num_speculative_tokens: 3 there, 5 here): train on the same states under another name=…" in said
    other = {"inputs": {**inputs_of().inputs, "vocab": "another"}}
    said = message_of(wanted.refuse_other, "run", other, overwrite=False)
    assert "(train.keep_best, train.early_stop: unset there, " in said
    assert "; draft vocabulary (data.draft_vocab_size): " in said
    elsewhere = {**wanted.inputs, "store": "another", "seed": 1}
    assert wanted.remedy({"inputs": elsewhere}).startswith("use the same inputs again, choose"), "they are not the same"


def test_another_name_is_advised_only_where_that_run_has_what_the_stage_needs():
    config = load_config(["target.path=none", "name=none", "run_dir=run"])
    data = {"dataset_fingerprint": "", "fingerprint": "", "inputs": {"tokenizer": "", "template": ""}}
    store = provenance.of_store(config, data)
    other = store.inputs | {"codecs": {}}
    with_data = "extract under another name=… with data_dir=run/data, or replace it with overwrite=true"
    assert store.remedy({"inputs": other}) == with_data
    assert "another name" in store.remedy({"inputs": other | {"data": "other"}})
    export = provenance.of_export(config, {"fingerprint": "", "checkpoint": ""}, "", {}, [])
    evaluation = provenance.of_evaluation(config, data, {"checkpoint": ""}, {}, sampled=False)
    for trained in (export, evaluation):
        assert trained.remedy({"inputs": {}}) == "use the same inputs again, or replace it with overwrite=true"


# ---------------------------------------------------------------- written whole


def torn():
    yield b'{"new'
    raise OSError("No space left on device")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "sub" / "state.json"
    artifacts.write_json(file, {"old": 1})
    with pytest.raises(OSError, match="No space left"):
        artifacts.write_parts(file, torn())
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        artifacts.write_json(file, {"new": 2})
    assert json.loads(file.read_bytes()) == {"old": 1}
    assert [path.name for path in file.parent.iterdir()] == ["state.json"]


def test_a_folder_that_a_link_leads_to_is_replaced_and_emptied_where_it_lies(tmp_path):
    there, link = tmp_path / "disk" / "out", tmp_path / "out"
    there.mkdir(parents=True)
    link.symlink_to(there)
    for text in ("one", "two"):
        with artifacts.building(link) as folder:
            (folder / "file").write_text(text)
        assert (there / "file").read_text() == text
    artifacts.discard(link)
    assert link.is_symlink()
    assert list(there.parent.rglob("*")) == [there]


def test_a_target_is_another_where_any_file_that_decides_its_answers_is(tmp_path, monkeypatch):
    """And its prompts where any is that decides how they look. Large files are read in part, the last byte too."""
    for name, value in {"LARGE": 64, "SAMPLES": 3, "BLOCK": 8}.items():
        monkeypatch.setattr(artifacts, name, value)
    weights = ["a.safetensors", "pytorch_model.bin", "config.json", "modeling_own.py"]
    rendering = ["tokenizer.json", "spiece.model", "own.tiktoken", "vocab.txt", "merges.txt", "added_tokens.json"]
    rendering += ["special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"]
    for name in ("README.md", *weights, *rendering):
        artifacts.write_text(tmp_path / name, "a")
    artifacts.write_text(tmp_path / "large.safetensors", "a" * 100)
    seen = set()

    def news():
        """Whether weights, and rendering, are as they were never before."""
        now = artifacts.weights_fingerprint(str(tmp_path)), artifacts.rendering_fingerprint(str(tmp_path))
        new = [one not in seen for one in now]
        seen.update(now)
        return new

    assert news() == [True, True]
    for name in ("README.md", *weights, *rendering):
        (tmp_path / name).write_text("b")
        assert news() == [name in weights, name in rendering], name
    for place in (0, 50, 99):
        (tmp_path / "large.safetensors").write_text("a" * place + "b" + "a" * (99 - place))
        assert news() == [True, False], place


def test_the_data_of_stage_1_are_refused_where_they_are_to_be_whole_and_are_not(tmp_path):
    config, folder = Config(run_dir=str(tmp_path)), tmp_path / "data"
    artifacts.write_text(folder / "rows", "one")
    artifacts.write_json(folder / "manifest.json", {"files": artifacts.list_files(folder, [folder / "rows"])})
    assert provenance.read_data(config, whole=True) == provenance.read_data(config)
    (folder / "rows").write_text("eno")
    assert provenance.read_data(config)
    said = message_of(provenance.read_data, config, whole=True)
    assert "rows does not match its checksum" in said
    assert said.endswith(": run `eagle31 data` again")
