"""Whether an output is up to date: it was made from the current inputs, and its files are as written.

Every output has a record, written last: `inputs`, all that it depends on; `fingerprint`, their hash; `files`, with
sizes and checksums. An output of other inputs is refused or, with overwrite=true, made again. A damaged one is made
again. What each stage depends on is listed below, stage by stage.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle31_train.common import artifacts
from eagle31_train.common.artifacts import MANIFEST, describe_change, fingerprint, first_damaged, read_json
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.config import ANSWERED, Config, TargetConfig
from eagle31_train.earlier import ADDED, RENAMED

# Raise a number when the same inputs give another output: outputs with a lower number are then out of date.
LAYOUTS = {
    "embedded_target": 1,
    "toy_target": 1,
    "answers": 2,  # stage 1's; only recorded. 1 has no token ids; before that, blank prompts were answered, too
    # Until 2026-11-30 cut text answers could end with white space of the template, too; a row's history, thought,
    # pictures, channels, functions and documents were left out, and its train, loss and names of "length" not read.
    "data": 2,
    "store": 2,
    "train": 3,
    "evaluate": 3,
    "workload": 2,
    "suite": 3,  # 2 had no system_prompt, and tools without their wrapping
    "server": 1,
    "export": 1,
}
DATA = "eagle31 data"
REPLACE = "choose another name=… or run_dir=…, or replace it with overwrite=true"


@dataclass(frozen=True)
class Provenance:
    """What an output is made from.

    inputs: of JSON's types. card: inputs of the words and pictures around an output, which may change without it.
    pointers: name of an input → the given option that locates it, which may point to a wrong place.
    beside: how to keep both outputs with the least recomputation, and the inputs that may differ for that.
    options: name of an input → the option that it comes from, if that has another name.
    anew: whether a run of another name could have this output, too, without training first.
    """

    inputs: dict[str, Any]
    card: dict[str, Any] | None = None
    pointers: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, set[str]] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    anew: bool = True

    @property
    def all_inputs(self) -> dict[str, Any]:
        return self.inputs if self.card is None else {**self.inputs, "card": self.card}

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.all_inputs)

    def record(self, **facts: Any) -> dict[str, Any]:
        """Return an output's record: its inputs, their fingerprint, and other facts."""
        return {"fingerprint": self.fingerprint, "inputs": self.all_inputs, **facts}

    def matches(self, record: Mapping[str, Any]) -> bool:
        """Return whether the output with this record was made from these inputs; its card may differ."""
        inputs = record.get("inputs", {})
        return fingerprint({**inputs, "card": None}) == fingerprint({**self.inputs, "card": None})

    def refuse_other(self, where: object, record: Mapping[str, Any], overwrite: bool) -> None:
        """Raise UserError, naming the changes, for an output of other inputs, unless it may be overwritten."""
        if not overwrite and not self.matches(record):
            change = describe_change(record.get("inputs", {}), self.all_inputs, options={**RENAMED, **self.options})
            change = _tell_of_decay(change)
            raise UserError(f"{where} was made from other inputs ({change}): {self.remedy(record)}")

    def remedy(self, record: Mapping[str, Any]) -> str:
        """Return advice on an output of other inputs: to replace it only if no option may point to a wrong one."""
        before = record.get("inputs", {})
        wrong = [given for name, given in self.pointers.items() if before.get(name) != self.inputs.get(name)]
        if wrong:
            return f"correct {' or '.join(wrong)}, or choose another name=… or run_dir=…"
        differ = {name for name in {**before, **self.inputs} if before.get(name) != self.inputs.get(name)}
        if self.beside and differ <= self.beside[1]:
            return f"{self.beside[0]}, or replace it with overwrite=true"
        return f"use the same inputs again, {REPLACE if self.anew else 'or replace it with overwrite=true'}"


def up_to_date(
    output: Path,
    provenance: Provenance,
    overwrite: bool,
    record_path: Path | None = None,
    made_by: str = "this command",
) -> bool:
    """Return whether an output exists, is undamaged, and was made from these inputs, its card included: its stage is
    done. Raises as `refuse_other` does.

    record_path: that of the output's record, which lists files relative to its own folder; by default the manifest in
    the folder `output`. made_by: the command that makes it."""
    record_path = record_path or output / MANIFEST
    if not record_path.is_file():
        return False
    record = read_json(record_path, made_by)
    provenance.refuse_other(output, record, overwrite)
    if record.get("fingerprint") != provenance.fingerprint:
        return False
    if damage := first_damaged(record_path.parent, record.get("files", {})):
        note(f"{damage}; making {output} again")
    return damage is None


def read_data(config: Config, whole: bool = False) -> dict[str, Any]:
    """Return stage 1's manifest, which describes its conversations and the target. UserError if there is none or, with
    `whole`, if its files are missing or damaged."""
    manifest = read_json(config.data_folder / MANIFEST, DATA)
    if whole and (damage := first_damaged(config.data_folder, manifest.get("files", {}))):
        raise UserError(f"{damage}: run `{DATA}` again")
    return manifest


def are_answers(inputs: Mapping[str, Any]) -> bool:
    """Return whether a data set was made of the target's answers to prompts. inputs: those of stage 1's manifest."""
    sources = inputs.get("sources")  # earlier versions have no list
    return isinstance(sources, list) and [file for file, _ in sources] == [ANSWERED]


def recorded(section: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under their names before RENAMED, without those that have the value given in ADDED."""
    named = {f"{section}.{name}": value for name, value in options.items()}
    kept = {name: value for name, value in named.items() if name not in ADDED or value != ADDED[name]}
    return {recorded_name(name): value for name, value in kept.items()}


def recorded_name(option: str) -> str:
    """Return the name in records of an option such as train.fc_init_scale."""
    return next((old for old, new in RENAMED.items() if new == option), option).split(".")[-1]


def recorded_value(section: Mapping[str, Any], option: str) -> Any:
    """Return an option's value in a section of a record. If it has none: the value in ADDED, or None."""
    return section.get(recorded_name(option), ADDED.get(option))


def _tell_of_decay(change: str) -> str:
    """Return a change of inputs with the reason for another train.decays: an earlier version, or another decay."""
    if "train.weight_decay: " in change:  # that says it all
        return "; ".join(part for part in change.split("; ") if not part.startswith("train.decays: "))
    lm_head_decayed = "train.weight_decay: an earlier version also decayed lm_head, this one only linear layers"
    return change.replace("train.decays: unset there, maps here", lm_head_decayed)


# ---------------------------------------------------------------- what each stage's output depends on

# vLLM arguments that decide where and how fast it runs, but not what it computes, except for rounding.
ENGINE_RESOURCES = {"tensor_parallel_size", "enable_expert_parallel", "distributed_executor_backend", "enforce_eager"}
ENGINE_RESOURCES |= {"gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len", "max_num_seqs"}
ENGINE_RESOURCES |= {"max_num_batched_tokens", "disable_log_stats"}
# Options of training that steer memory, reporting, saving and stopping, but not what is learnt.
WITHOUT_EFFECT = {"accumulation", "recompute", "compile", "workers", "eval_every", "eval_samples", "checkpoint_every"}
WITHOUT_EFFECT |= {"keep_checkpoints", "time_limit", "finish", "skip_nonfinite", "wandb", "project", "tensorboard"}
WITHOUT_EFFECT |= {"deterministic", "kernels", "context_parallel"}
# Inputs of a training → the options that they come from. `choice` is there if acceptance chooses the checkpoint.
OF_TRAINING = {
    "vocab": "draft vocabulary (data.draft_vocab_size)",
    "train.choice": "train.keep_best, train.early_stop",
    "train.choice.prompts": "prompts of extract.trajectories",
    "train.choice.draft_tokens": "evaluate.num_speculative_tokens",
    "train.choice.dtype": "evaluate.dtype",
    "train.choice.every": "train.eval_every",
    "train.choice.keep_best": "train.keep_best",
    "train.choice.early_stop": "train.early_stop",
}
# Inputs of a store → the options that they come from.
OF_STORE = {
    "codecs.aux": "store.aux_codec",
    "codecs.last": "store.last_codec",
    "engine.name": "extract.engine",
    "shard_tokens": "extract.shard_tokens",
    "target.name": "target.path",
}
# Options of evaluation that choose prompts, and are recorded with the workloads.
CHOOSE_PROMPTS = {"prompts", "suites", "perturbations"}
# Also recorded with the workloads. A measurement is by one backend only.
OF_WORKLOAD = {"num_prompts", "temperature", "top_p", "top_k", "backend"}
SERVING_ONLY = {"serve_depths", "concurrency", "vllm_python", "vllm_args"}
DECODING_ONLY = {"depths", "batch_size", "timed_prompts", "drift"}


def target_identity(target: TargetConfig) -> dict[str, Any]:
    weights = artifacts.weights_fingerprint(target.path)
    return {"name": target.name, "revision": target.revision, "weights": weights, "dtype": target.dtype}


def of_data(config: Config, corpus: Mapping[str, Any], template: Mapping[str, Any], vocab_size: int) -> Provenance:
    """Stage 1's data set. corpus: the rows, by the hashes of their files. template: tokenizer and chat template."""
    names = ("max_length", "heldout", "shuffle", "draft_vocab_size")
    options = {name: getattr(config.data, name) for name in names}
    if (options["draft_vocab_size"] or 0) > vocab_size:
        options["draft_vocab_size"] = None  # all tokens are kept, as without it
    options["draft_vocab_coverage"] = None  # an option of earlier versions
    return Provenance(
        {"layout": LAYOUTS["data"], **corpus, **template, "vocab_size": vocab_size, **options},
        options={"template_args": "target.template_args", "format": "data.format", **{n: f"data.{n}" for n in names}},
    )


def of_store(config: Config, data: Mapping[str, Any]) -> Provenance:
    """Stage 2's store. data: stage 1's manifest. Its draft vocabulary is left out, as states do not depend on it."""
    arguments = {n: value for n, value in config.extract.engine_args.items() if n not in ENGINE_RESOURCES}
    elsewhere = f"another name=… with data_dir={config.data_folder}"
    elsewhere += " and another store_dir=…" * bool(config.store_dir)
    return Provenance(
        {
            "layout": LAYOUTS["store"],
            "data": data["dataset_fingerprint"],
            "tokenizer": data["inputs"]["tokenizer"],
            "template": data["inputs"]["template"],
            "target": {**target_identity(config.target), "aux_layers": config.target.aux_layers},
            # Engines round differently, and quantization changes more: a store holds the states of one engine.
            "engine": {"name": config.extract.engine, "args": arguments},
            "codecs": {"aux": config.store.aux_codec, "last": config.store.last_codec},
            "shard_tokens": config.extract.shard_tokens,
        },
        pointers={"data": f"data_dir={config.data_dir}"} if config.data_dir else {},
        beside=(f"extract under {elsewhere}", {"target", "engine", "codecs", "shard_tokens"}),
        options=OF_STORE,
    )


def of_training(
    config: Config,
    store: str,
    dataset: str,
    vocab_sha256: str,
    initial_weights: str | None,
    chosen_on: list[str] | None = None,
) -> Provenance:
    """Stage 3's weights. store, dataset: fingerprints. initial_weights: the identity of `train.init_from`'s, if set.
    chosen_on: the prompts whose measured acceptance chooses the step, if one is chosen."""
    options = recorded("train", asdict(config.train))
    recipe = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT | {"init_revision"}}
    if recipe["weight_decay"]:  # in earlier versions lm_head and the drafter's own embedding decayed, too
        recipe["decays"] = "maps"
    states = f"data_dir={config.data_folder} store_dir={config.store_location}"
    choice = {name: recipe.pop(name) for name in ("keep_best", "early_stop")}
    if chosen_on is not None:  # otherwise the record is as it was before these options existed
        choice |= {"prompts": chosen_on, "every": config.train.eval_every, "dtype": config.evaluate.dtype}
        recipe["choice"] = {**choice, "draft_tokens": config.evaluate.num_speculative_tokens}
    return Provenance(
        {
            "layout": LAYOUTS["train"],
            "store": store,
            "data": dataset,
            "vocab": vocab_sha256[:16],
            "drafter": recorded("drafter", asdict(config.drafter)),
            "train": {**recipe, "init_from": initial_weights},
            "seed": config.seed,
        },
        pointers={"store": f"store_dir={config.store_dir}"} if config.store_dir else {},
        beside=(f"train on the same states under another name=… with {states}", {"drafter", "train", "seed"}),
        options=OF_TRAINING,
    )


def of_evaluation(
    config: Config,
    data: Mapping[str, Any],
    drafter: Mapping[str, str],
    workloads: Mapping[str, Any],
    sampled: bool,
    server: Mapping[str, Any] | None = None,
) -> Provenance:
    """Stage 4's result. data: stage 1's manifest. drafter: its identity. workloads: what the prompts depend on.
    sampled: some tokens are drawn, by the seed. server: for backend=vllm, its version and the target's arguments."""
    options = recorded("evaluate", asdict(config.evaluate))
    # Not advised for vLLM: comparisons always decode in process as well, for which the target may be too large.
    comparison = f"`eagle31 compare {config.run_dir} … compare.out=…`"
    # The warm-up is recorded with each measurement.
    left_out = {"warmup"} | CHOOSE_PROMPTS | (DECODING_ONLY if server else SERVING_ONLY)
    return Provenance(
        {
            **({"seed": config.seed} if sampled else {}),
            "layout": LAYOUTS["evaluate"],
            **drafter,
            "data": data["fingerprint"],
            "target": target_identity(config.target),
            "evaluate": {name: value for name, value in options.items() if name not in left_out},
            "workloads": workloads,
            **(server or {}),
        },
        beside=None if server else (f"measure it with {comparison}", {"evaluate", "workloads", "seed"}),
        anew=False,
    )


def of_workload(config: Config, end_ids: list[int], device: str, torch: str) -> dict[str, Any]:
    """Return what a measurement depends on besides workload and drafter; devices and versions differ in rounding."""
    options = recorded("evaluate", asdict(config.evaluate))
    left_out = CHOOSE_PROMPTS | SERVING_ONLY | OF_WORKLOAD
    return {
        "layout": LAYOUTS["workload"],
        "target": target_identity(config.target),
        "seed": config.seed,
        "end_ids": sorted(end_ids),
        **{name: value for name, value in options.items() if name not in left_out},
        "device": device,
        "torch": torch,
    }


def of_server(
    config: Config, arguments: Mapping[str, Any], requests: Mapping[str, Any], installation: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a server's answers depend on. Weights count by their content, not their path."""
    return {
        "layout": LAYOUTS["server"],
        "arguments": arguments,
        "target": artifacts.weights_fingerprint(config.target.path),
        "sent": requests,
        "warmup": config.evaluate.warmup,
        "engine": installation,
    }


def of_export(
    config: Config,
    train: Mapping[str, Any],
    weights_sha256: str,
    shape: Mapping[str, Any],
    target_ids: list[int],
) -> Provenance:
    """Stage 5's checkpoint, without its card. train: training's manifest. target_ids: of the draft vocabulary."""
    checkpoint = {
        "layout": LAYOUTS["export"],
        "train": train["fingerprint"],
        "checkpoint": train["checkpoint"],
        "weights": weights_sha256,
        "shape": recorded("drafter", shape),
        "vocab": fingerprint(target_ids),
        "target": config.target_name,
        "dtype": config.target.dtype,
    }
    if config.export_format != "vllm":  # speculators' config.json names the draft tokens, too
        checkpoint |= {"format": config.export_format, "draft_tokens": config.evaluate.num_speculative_tokens}
    return Provenance(checkpoint, anew=False)
