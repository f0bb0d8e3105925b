"""Up to date means: made from the wanted inputs, and every file as it was written, whole or not at all."""

import errno
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
    (out / "a").write_text("eno")
    assert not up_to_date(out), "though of the same size"
    (out / "a").write_text("one")
    assert up_to_date(out)
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
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "sub" / "state.json"
    artifacts.write_json(file, {"old": 1})
    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
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


# ---------------------------------------------------------------- what an output depends on


def loaded(*options):
    return load_config(["+experiment=smollm2", "target.path=a/b", *options])


def assert_distinct(made, others):
    """Outputs of one base and of what differs from it in one thing: none is taken for another."""
    fingerprints = [made.fingerprint, *(other.fingerprint for other in others)]
    assert len({*fingerprints}) == len(fingerprints), [
        i for i, one in enumerate(fingerprints) if fingerprints.index(one) < i
    ]


def test_a_training_is_another_where_one_thing_that_its_weights_depend_on_is():
    steering = ["ttt_length=4", "gamma=0.5", "loss=ce", "lk=0.5", "oov=keep", "epochs=9", "max_steps=7"]
    steering += ["batch_tokens=5000", "window_tokens=9000", "slots_per_batch=64", "optimizer=adamw", "lr=0.5"]
    steering += ["warmup_ratio=0.5", "min_lr_ratio=0.5", "weight_decay=0.5", "betas=[0.5,0.5]", "max_grad_norm=9"]
    steering += ["precision=no", "fc_init_scale=0.5", "fc_input_scale=[2.0]"]
    options = [*(f"train.{option}" for option in steering), "seed=9", "drafter.num_layers=2", "drafter.fc_norm=false"]
    given = {"store": "s", "dataset": "d", "vocab_sha256": "v" * 64, "initial_weights": "i"}

    def made(*words, **changes):
        return provenance.of_training(loaded(*words), **{**given, **changes})

    assert_distinct(made(), [*(made(option) for option in options), *(made(**{name: "other"}) for name in given)])
    unscaled = made("train.fc_input_scale=[]").inputs["train"]
    assert provenance.recorded_value(unscaled, "train.fc_input_scale") == [], "and not left open, when a run goes on"


DATA = {"fingerprint": "f", "dataset_fingerprint": "d", "inputs": {"tokenizer": "t", "template": "c"}}


def test_a_store_is_another_where_one_thing_that_its_states_depend_on_is():
    engine = ("extract.engine=vllm", "extract.engine_args.quantization=fp8")
    options = [(f"target.{one}",) for one in ("path=a/c", "revision=v2", "dtype=float16", "aux_layers=[1,2,3]")]
    options += [engine[:1], engine, ("store.aux_codec=fp8",), ("store.last_codec=fp8",), ("extract.shard_tokens=99",)]
    data = [DATA | {"dataset_fingerprint": "other"}]
    data += [DATA | {"inputs": DATA["inputs"] | {name: "other"}} for name in ("tokenizer", "template")]
    config, others = loaded(), [provenance.of_store(loaded(*words), DATA) for words in options]
    assert_distinct(provenance.of_store(config, DATA), [*others, *(provenance.of_store(config, one) for one in data)])
    faster = loaded(*engine, "extract.engine_args.tensor_parallel_size=8")
    assert provenance.of_store(faster, DATA).fingerprint == others[5].fingerprint


def test_data_are_others_where_one_thing_that_they_depend_on_is():
    def made(*words, corpus="c", template="t", size=50_000):
        some = words or ("data.draft_vocab_size=32000",)
        return provenance.of_data(loaded("data.shuffle=4", *some), {"corpus": corpus}, {"template": template}, size)

    options = ["max_length=99", "heldout=0.3", "shuffle=5", "shuffle=null"]
    others = [made("data.draft_vocab_size=32000", f"data.{option}") for option in options]
    others += [made("data.draft_vocab_size=40000")]
    others += [made(corpus="other"), made(template="other"), made(size=60_000)]
    assert_distinct(made(), others)
    whole = [made(f"data.draft_vocab_size={size}", size=50_000).fingerprint for size in (50_000, 50_001, "null")]
    assert whole[1] == whole[2], "all tokens are kept"


@pytest.mark.parametrize("server", [None, {"version": "1"}])
def test_a_result_is_another_where_one_thing_that_it_depends_on_is(server):
    def made(*words, drafter="d", data=DATA, workloads="w", sampled=True, server=server):
        given = {"drafter": drafter}, {"all": workloads}, sampled, server
        return provenance.of_evaluation(loaded(*words), data, *given)

    options = ["target.revision=v2", "target.dtype=float16", "seed=9", "evaluate.num_prompts=9"]
    options += [
        f"evaluate.{one}" for one in ("num_speculative_tokens=2", "max_new_tokens=9", "temperature=0.5", "top_p=0.5")
    ]
    options += [f"evaluate.{one}" for one in ("top_k=5", "draft_sampling=probabilistic", "dtype=bfloat16")]
    of_backend = ["serve_speculative_tokens=[9]", "concurrency=[9]", "vllm_args={x: 1}"]
    in_process = ["max_speculative_tokens=9", "batch_size=9", "timed_prompts=9", "drift=false"]
    mine, not_mine = (of_backend, in_process) if server else (in_process, of_backend)
    others = [*(made(option) for option in options), *(made(f"evaluate.{option}") for option in mine)]
    others += [made(drafter="other"), made(data=DATA | {"fingerprint": "other"}), made(workloads="other")]
    others += [made(server={"version": "2"})]
    assert_distinct(made(), others)
    assert all(made(f"evaluate.{option}").fingerprint == made().fingerprint for option in not_mine)
    greedy = [made(*seed, sampled=False).fingerprint for seed in ((), ("seed=9",))]
    assert greedy[0] == greedy[1], "nothing is drawn"


def test_a_measurement_is_another_where_one_thing_that_it_depends_on_is():
    def made(*words, ends=(1, 2), device="cpu", torch="2"):
        return Provenance(provenance.of_workload(loaded(*words), list(ends), device, torch))

    options = ["target.revision=v2", "target.dtype=float16", "seed=9", "evaluate.num_speculative_tokens=2"]
    options += [f"evaluate.{one}" for one in ("max_new_tokens=9", "dtype=bfloat16", "max_speculative_tokens=9")]
    options += [f"evaluate.{one}" for one in ("batch_size=9", "timed_prompts=9", "drift=false", "warmup=false")]
    others = [*(made(option) for option in options), made(ends=(1,)), made(device="cuda"), made(torch="3")]
    assert_distinct(made(), others)
    assert made(ends=(2, 1)).fingerprint == made().fingerprint


def test_a_servers_measurement_is_another_where_one_thing_that_it_depends_on_is():
    given = {"arguments": {"a": 1}, "requests": {"r": 1}, "installation": {"vllm": "1"}}

    def made(*words, **changes):
        return Provenance(provenance.of_server(loaded(*words), **{**given, **changes}))

    others = [made("target.path=a/c"), made("evaluate.warmup=false"), *(made(**{name: {"x": 1}}) for name in given)]
    assert_distinct(made(), others)


def test_an_export_is_another_where_one_thing_in_its_files_is():
    given = {"train": {"fingerprint": "f", "checkpoint": "c"}, "weights_sha256": "w", "shape": {"hidden_size": 1}}
    given |= {"target_ids": [1, 2]}
    changed = {"weights_sha256": "x", "shape": {"hidden_size": 2}, "target_ids": [1, 3]}
    trained = [given["train"] | {name: "other"} for name in given["train"]]

    def made(*words, **changes):
        return provenance.of_export(loaded(*words), **{**given, **changes})

    options = [
        ("target.path=a/c",),
        ("target.dtype=float16",),
        ("export_format=speculators",),
        ("export_format=sglang",),
    ]
    others = [made(*words) for words in options] + [made(train=one) for one in trained]
    others += [made("export_format=speculators", "evaluate.num_speculative_tokens=2")]
    assert_distinct(made(), [*others, *(made(**{name: value}) for name, value in changed.items())])
