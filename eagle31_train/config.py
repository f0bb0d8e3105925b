"""What flows between the stages: the types of the configuration and of the files that stages hand over.

Each option's default and help text stand here once. The YAML files under `configs/` only say where an experiment
differs from these defaults.
"""

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle31_train.common.errors import UserError

DTYPES = ("bfloat16", "float16", "float32")
CODECS = ("bf16", "int8_channel", "fp8", "int8", "int4")
FORMATS = ("auto", "messages", "sharegpt", "alpaca", "turns", "prompt", "tokens")
ROW_FILES = (".jsonl", ".json", ".csv", ".parquet")  # and these with .gz
ENGINES = ("transformers", "vllm")
KERNELS = ("auto", "fused", "plain")
EXPORTS = ("vllm", "speculators", "sglang")


def opt(default: Any, help: str, choices: tuple[str, ...] | None = None, finite: bool = True, **bounds: float) -> Any:
    """Return a configuration field. choices and bounds (above, at_least, at_most, below) apply to a list's values."""
    metadata = {"help": help, "choices": choices, "bounds": bounds, "finite": finite}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_value(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Raise UserError for a value that its option does not accept; check a list item by item."""
    if isinstance(value, list):
        for item in value:
            check_value(name, item, metadata)
    elif (choices := metadata.get("choices")) and value not in (*choices, None):
        raise UserError(f"{name}={value!r} is not one of {', '.join(choices)}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        bounds = metadata.get("bounds", {})
        if not all(COMPARE[word](value, bound) for word, bound in bounds.items()):  # NaN fails every comparison
            takes = " and ".join(f"{word.replace('_', ' ')} {bound:g}" for word, bound in bounds.items())
            raise UserError(f"{name}={value} must be {takes}")
        if math.isnan(value) or (metadata.get("finite") and math.isinf(value)):
            raise UserError(f"{name}={value} must be a finite number")


COMPARE = {"above": operator.gt, "at_least": operator.ge, "at_most": operator.le, "below": operator.lt}


def is_hub_id(path: str) -> bool:
    """Return whether a path is a hub id, `owner/name`, and not a local file or folder."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path)) and not Path(path).exists()


def is_hub_set(path: str) -> bool:
    """Return whether a path may be a hub data set: a hub id without the extension of a file of rows."""
    return is_hub_id(path) and not path.lower().removesuffix(".gz").endswith(ROW_FILES)


# ---------------------------------------------------------------- configuration


@dataclass
class TargetConfig:
    path: str = opt("???", "directory or hub id of the target, in transformers format")
    revision: str | None = opt(None, "hub revision")
    dtype: str = opt("auto", "auto: the run's recorded one, else bfloat16 where the hardware has it", ("auto", *DTYPES))
    device: str = opt("auto", "cpu, cuda, cuda:N, or auto (a GPU per process if there are any)")
    device_map: str | None = opt(None, "spread over several devices, as transformers' device_map; one process only")
    trust_remote_code: bool = opt(False, "run Python code that comes with the target")
    chat_template: str | None = opt(None, "Jinja file used instead of the tokenizer's chat template")
    template_args: dict[str, Any] = opt({}, "variables of the chat template: target.template_args.thinking=false, …")
    aux_layers: list[int] | None = opt(
        None, "auxiliary layers; i is the input of layer i; default: vLLM's 2, N//2, N-3"
    )

    @property
    def is_hub_id(self) -> bool:
        return is_hub_id(self.path)

    @property
    def name(self) -> str:
        """The target's public name, wherever it is stored: its hub id, or the last part of its folder."""
        name = Path(self.path).name
        return self.path if self.is_hub_id else Path(self.path).resolve().name if name in ("", "..") else name


OWN_SERVER = "vllm"  # value of data.generate.server: start one for the answers


@dataclass
class GenerateConfig:
    max_new_tokens: int = opt(320, "longest answer, in tokens", at_least=1)
    temperature: float = opt(0.0, "sampling temperature of the answers; 0 decodes greedily", at_least=0)
    top_p: float = opt(1.0, "top-p (nucleus) of sampled answers", above=0, at_most=1)
    top_k: int | None = opt(None, "sample answers from the k likeliest tokens; default: from all", at_least=1)
    samples: int = opt(1, "answers per prompt; the first of several is greedy, the others are sampled", at_least=1)
    batch_size: int = opt(32, "prompts answered in one batch by an in-process target", at_least=1)
    server: str | None = opt(
        None, "vLLM (or SGLang) that serves the target: http://HOST:PORT/v1 or URL,URL; vllm: one of our own"
    )
    model: str | None = opt(None, "name of the model on the server; default: target.path")
    concurrency: int = opt(128, "requests in flight, over all servers", at_least=1)


@dataclass
class SelfPromptsConfig:
    count: int = opt(2000, "number of prompts that the target writes (data.prompts=self)", at_least=1)
    turns: int = opt(1, "user turns in each; the target answers between them", at_least=1)
    max_new_tokens: int = opt(256, "longest user turn, in tokens; one that does not end is refused", at_least=1)
    temperature: float = opt(1.0, "sampling temperature of the prompts", above=0)
    top_p: float = opt(1.0, "top-p (nucleus) of the prompts", above=0, at_most=1)
    system: dict[str, Any] = opt({}, "system prompts used in turn to write them, NAME: TEXT; left out of the data")


SELF = "self"  # value of data.prompts or a source's path: the target writes the prompts
SELF_WRITTEN = "prompts.jsonl"  # in the run's folder, once the target has written it
ANSWERED = "conversations.jsonl"  # there, too: prompts with the target's answers


@dataclass
class DataConfig:
    conversations: str | None = opt(None, "conversations to train on: file, folder, glob, or hub id")
    prompts: str | None = opt(None, "prompts for the target to answer (the same forms); default: self, it writes them")
    sources: dict[str, Any] = opt({}, "several sources, mixed: data.sources.NAME={path: …, weight: 1, split: train}")
    rows: int | None = opt(None, "rows of the mixture; default: as many as its weights give", at_least=1)
    split: str = opt("train", "split of a hub data set")
    subset: str | None = opt(None, "subset (config name) of a hub data set that has several")
    revision: str | None = opt(None, "branch, tag or commit of a hub data set")
    stream_rows: int | None = opt(None, "download and read only this many rows of a hub data set", at_least=1)
    format: str = opt("auto", f"format of a row: {', '.join(FORMATS)}", choices=FORMATS)
    max_length: int = opt(2048, "longest conversation, in tokens; longer ones are cut and counted", at_least=2)
    heldout: float = opt(0.05, "share of prompts held out, chosen by a hash of the prompt", at_least=0, below=1)
    shuffle: int | None = opt(None, "seed that shuffles the training conversations; default: as read", at_least=0)
    draft_vocab_size: int | None = opt(
        None, "draft tokens to keep, the assistant's most frequent; default: all", at_least=1
    )
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    self_prompts: SelfPromptsConfig = field(default_factory=SelfPromptsConfig)

    @property
    def given(self) -> bool:
        return bool(self.conversations or self.prompts or self.sources)

    @property
    def hub_sets(self) -> list[str]:
        named = [self.conversations, self.prompts, *self.source_paths, *self.sources.values()]
        return sorted({path for path in named if isinstance(path, str) and is_hub_set(path)})

    @property
    def source_paths(self) -> list[str]:
        return [path for path, _ in self.weighted_paths]

    @property
    def weighted_paths(self) -> list[tuple[str, Any]]:
        """Path and weight of every source that has a path. Weights are unchecked."""
        entries = [one for one in self.sources.values() if isinstance(one, dict)]
        return [(path, one.get("weight", 1)) for one in entries if isinstance(path := one.get("path"), str)]

    @property
    def writes_prompts(self) -> bool:
        return SELF in (self.prompts, *self.source_paths)

    @property
    def wants_answers(self) -> bool:
        """Whether only prompts are given; the target answers them, unless `regenerate` says otherwise."""
        return self.conversations is None and (self.prompts is not None or self.writes_prompts)


@dataclass
class ExtractConfig:
    engine: str = opt("transformers", "what runs the target; vllm for quantized or very large ones", choices=ENGINES)
    engine_args: dict[str, Any] = opt({}, "vLLM's own arguments: extract.engine_args.tensor_parallel_size=4, …")
    part: int = opt(0, "index of this command among extract.parts, from 0; part 0 finishes the store", at_least=0)
    parts: int = opt(1, "number of commands that share the work, each with its own extract.part", at_least=1)
    batch_tokens: int = opt(4096, "padded tokens in one forward pass of the target", at_least=1)
    shard_tokens: int = opt(16384, "tokens in one shard of the store", at_least=1)
    trajectories: int = opt(8, "held-out prompts on which training measures acceptance; 0: none", at_least=0)
    gate_batches: int = opt(3, "batches that the fidelity gate compares with the target's own logits", at_least=0)
    gate_top1: float = opt(0.99, "lowest top-1 agreement accepted, before the store's codec")
    gate_kl: float = opt(0.02, "largest mean KL accepted, in nats, after the codec")


@dataclass
class StoreConfig:
    aux_codec: str = opt("bf16", "of auxiliary states: bf16 (exact), int8_channel (half the bytes) or coarser", CODECS)
    last_codec: str = opt("bf16", "of last hidden states: the same", CODECS)
    follow: bool = opt(False, "train: start while the store is still being written")
    max_bytes: str | None = opt(None, "extract: past this, wait until a following training frees shards, e.g. 200GB")
    patience: float = opt(3600.0, "seconds that a stage waits for a new shard, or for space, before it stops", above=0)
    cache_dir: str | None = opt(None, "folder for local copies of a remote store's shards; default: run_dir/cache")
    cache_bytes: str = opt("64GB", "largest size of these copies")


@dataclass
class DrafterConfig:
    architecture: str = opt("llama", "attention of the drafter: llama (GQA) or mla", choices=("llama", "mla"))
    fc_norm: bool = opt(True, "EAGLE 3.1: an RMSNorm on each auxiliary state before fc")
    norm_output: bool = opt(True, "EAGLE 3.1: feed the post-norm state into the next step")
    norm_before_residual: bool = opt(False, "the first layer's residual is hidden_norm(h) instead of h")
    norm_before_fc: bool = opt(False, "one RMSNorm on all auxiliary states together before fc (llama only)")
    num_layers: int = opt(1, "decoder layers; each costs its time in every draft step", at_least=1, at_most=64)
    qk_norm: bool = opt(False, "an RMSNorm on every query and key head, as in Qwen3 (llama only)")
    sliding_window: int | None = opt(
        None, "tokens that attention sees, the position's own included; default: all (llama only)", above=0
    )
    attention_bias: bool = opt(False, "biases of q, k, v and, without qk_norm, o_proj (llama only)")
    mlp_bias: bool = opt(False, "biases of the MLP (llama without qk_norm only)")
    parallel: bool = opt(False, "draft all tokens in one pass, as P-EAGLE does (llama only)")
    ptd_token_id: int | None = opt(None, "parallel: id of the mask token; default: the vocabulary's last", at_least=0)
    # null: derived from the target's config.json (targets/derive.py)
    hidden_size: int | None = opt(None, "default: the target's", above=0)
    intermediate_size: int | None = opt(None, "width of the MLP; default: what one token of the target uses", above=0)
    num_attention_heads: int | None = opt(None, "query heads; default: the target's", above=0)
    num_key_value_heads: int | None = opt(None, "default: the target's, or num_attention_heads if given", above=0)
    head_dim: int | None = opt(None, "default: the target's, or hidden_size / num_attention_heads if given", above=0)
    rms_norm_eps: float | None = opt(None, "epsilon of every RMSNorm of the drafter; default: the target's", above=0)
    rope_theta: float | None = opt(None, "RoPE base; default: the target's", above=0)
    rope_scaling: dict[str, Any] = opt({}, "RoPE scaling; default: the target's, or none if rope_theta is given")
    max_position_embeddings: int | None = opt(
        None, "longest context for drafting (vLLM's V1 runner, CPUs); export may raise it; default: target's", above=0
    )
    share_embedding: bool = opt(True, "use the target's embed_tokens: frozen, and left out of the checkpoint")
    train_lm_head: bool = opt(True, "train lm_head, which starts as the target's; with muon it is better frozen")
    # MLA only
    q_lora_rank: int | None = opt(None, "MLA: rank of the queries; null for full rank", above=0)
    kv_lora_rank: int | None = opt(None, "MLA: rank of keys and values", above=0)
    qk_nope_head_dim: int | None = opt(None, "MLA: key width without position", above=0)
    qk_rope_head_dim: int | None = opt(None, "MLA: key width with position", above=0)
    v_head_dim: int | None = opt(None, "MLA: value width", above=0)


@dataclass
class TrainConfig:
    ttt_length: int = opt(7, "TTT (training-time test) steps: draft steps trained", at_least=1, at_most=256)
    gamma: float = opt(0.8, "weight of step k is gamma**k", above=0)
    loss: str = opt("kl", "kl or ce (same gradients; kl is zero for a perfect drafter)", choices=("kl", "ce"))
    lk: float = opt(0.0, "weight of the LK loss, -log sum(min(p, q)); the rest is train.loss", at_least=0, at_most=1)
    oov: str = opt("mask", "pairs whose arg-max is no draft token: mask (leave out) or keep", choices=("mask", "keep"))
    epochs: int = opt(1, "passes over the training split", at_least=1)
    max_steps: int | None = opt(None, "stop after this many optimizer steps", at_least=1)
    batch_tokens: int | None = opt(
        4096, "tokens of one optimizer step over all ranks; no conversation is longer; null: by the corpus", at_least=1
    )
    window_tokens: int | None = opt(None, "shuffle within windows of this many tokens; default: of all", at_least=1)
    gradient_accumulation_steps: int = opt(1, "micro-batches per rank and optimizer step", at_least=1)
    context_parallel: int = opt(1, "ranks that share the tokens of each conversation, for very long ones", at_least=1)
    slots_per_batch: int | None = opt(
        None, "random slots trained per optimizer step, unbiased; default: all", at_least=1
    )
    optimizer: str = opt("adamw", "adamw, or muon on the matrices (one process, DDP, FSDP2)", choices=("adamw", "muon"))
    lr: float | None = opt(1e-4, "peak learning rate; null: the optimizer's for the drafter's width", above=0)
    warmup_ratio: float = opt(0.05, "share of the steps that warm up", at_least=0, at_most=1)
    min_lr_ratio: float = opt(0.1, "the cosine ends at this share of lr", at_least=0, at_most=1)
    weight_decay: float | None = opt(0.0, "of linear layers except lm_head; null: from width and steps", at_least=0)
    betas: list[float] = opt([0.9, 0.95], "AdamW's betas", at_least=0, below=1)
    max_grad_norm: float = opt(0.5, "gradients are clipped to this norm", above=0, finite=False)
    precision: str = opt("auto", "bf16 (fp32 weights), no (fp32); auto: the faster one", choices=("auto", "bf16", "no"))
    fc_init_scale: float | None = opt(None, "factor on fc's initial weights; default: 1", above=0)
    fc_input_scale: list[float] | None = opt(
        None, "EAGLE 3: fc trains on states times this, by layer; default: powers of 2 near 1 / RMS", above=0
    )
    init_from: str | None = opt(None, "start from the weights of a run, or of an EAGLE 3 draft (folder, hub id)")
    init_revision: str | None = opt(None, "hub revision of init_from")
    num_workers: int = opt(1, "threads that read batches ahead; 0 reads each when it is needed", at_least=0)
    activation_checkpointing: bool = opt(False, "recompute activations: less memory, somewhat more time")
    kernels: str = opt("auto", "fused (Triton) or plain torch kernels; auto: fused where supported", choices=KERNELS)
    deterministic: bool = opt(False, "on GPUs, use only deterministic kernels; slower")
    eval_every: int = opt(
        100, "steps between evaluations on the held-out split, also done after the last step", at_least=1
    )
    eval_samples: int = opt(64, "held-out conversations per evaluation; the last step reads all of them", at_least=1)
    keep_best: bool = opt(False, "use the checkpoint with the greatest acceptance length measured in training")
    early_stop: int | None = opt(None, "stop after this many measurements of acceptance without a rise", at_least=1)
    finish: bool = opt(False, "end a stopped run at its newest checkpoint, to evaluate and export it")
    checkpoint_every: int = opt(100, "steps between checkpoints", at_least=1)
    keep_checkpoints: int = opt(2, "number of newest checkpoints to keep", at_least=1)
    time_limit: str | None = opt(None, "save and exit with status 75 after this time: 3h50m, 90m, 30s")
    skip_nonfinite: int = opt(0, "how many steps may be skipped because loss or gradient is not finite", at_least=0)
    wandb: str = opt("offline", "Weights & Biases", choices=("online", "offline", "disabled"))
    project: str = opt("eagle31", "Weights & Biases project")
    tensorboard: bool = opt(False, "also write TensorBoard events, to run_dir/train/tensorboard")


@dataclass
class EvaluateConfig:
    prompts: str | None = opt(None, "prompts to decode: file, folder, glob or hub id; default: the held-out split")
    suites: dict[str, Any] = opt({}, "more prompts: evaluate.suites.NAME={path: FILE or hub id}, or +suite=[mt_bench]")
    perturbations: list[str] = opt([], "measure every set again under each of these: no_template, context_2, …")
    num_prompts: int = opt(20, "prompts of each workload", at_least=1)
    num_speculative_tokens: int = opt(3, "draft tokens per verification, for the headline", at_least=1)
    max_speculative_tokens: int = opt(8, "acceptance is measured for 1 to this many draft tokens", at_least=1)
    max_new_tokens: int = opt(128, "tokens generated per prompt", at_least=2)
    temperature: float = opt(0.0, "0 decodes greedily; otherwise target tokens are sampled", at_least=0)
    top_p: float = opt(1.0, "top-p (nucleus) of sampled tokens", above=0, at_most=1)
    top_k: int | None = opt(None, "sample from the k likeliest tokens; default: from all", at_least=1)
    draft_sampling: str = opt("greedy", "vLLM's draft_sample_method", choices=("greedy", "probabilistic"))
    batch_size: int = opt(8, "prompts decoded together", at_least=1)
    timed_prompts: int = opt(5, "prompts decoded one at a time to measure one user's tokens/s", at_least=1)
    dtype: str = opt("float32", "precision; the equality check is exact in float32 only", choices=DTYPES)
    warmup: bool = opt(True, "decode the first prompt once before timing")
    drift: bool = opt(True, "measure the drafter's attention shares and state norms at every depth")
    backend: str = opt("transformers", "vllm serves the export and measures latencies too", choices=ENGINES)
    vllm_python: str = opt("python", "the python of vLLM's environment, for backend=vllm and data.generate.server=vllm")
    vllm_args: dict[str, Any] = opt({}, "further arguments for these servers: tensor_parallel_size=8, …")
    serve_speculative_tokens: list[int] = opt([1, 3, 5], "backend=vllm: numbers of draft tokens tried", at_least=1)
    concurrency: list[int] = opt([1, 4, 16], "backend=vllm: numbers of concurrent requests tried", at_least=1)


@dataclass
class CompareConfig:
    out: str | None = opt(None, "output folder of the comparison; default: runs/compare/A-B")
    verified: int = opt(4, "prompts of each workload on which every drafter decodes for real, as a check", at_least=0)


@dataclass
class PlanConfig:
    target_parameters: float | None = opt(None, "plan: active parameters of the target; default: counted", above=0)
    tokens: float | None = opt(None, "plan: tokens of the training split; default: as counted by stage 1", above=0)
    share: float = opt(0.5, "plan: the assistant's share of tokens, until they are counted", above=0, at_most=1)
    sample_tokens: int = opt(600, "plan: tokens of an average conversation, until they are counted", at_least=1)
    devices: int | None = opt(None, "plan: devices; default: this machine's GPUs, or eight H100", at_least=1)
    device_gib: float | None = opt(None, "plan: memory of one device, in GiB; default: as above", above=0)
    peak_tflops: float | None = opt(None, "plan: dense bf16 TFLOP/s of one device; default: as above", above=0)
    utilisation: float = opt(0.35, "plan: share of that rate which training is assumed to reach", above=0, at_most=1)
    bandwidth_gbs: float | None = opt(None, "plan: memory bandwidth of one device, in GB/s; default: as above", above=0)
    decode_utilisation: float = opt(0.25, "plan: assumed share of the fastest decoding", above=0, at_most=1)


@dataclass
class Config:
    name: str = opt("???", "name of the experiment; also names run_dir")
    run_dir: str = opt("runs/${name}", "folder that every stage writes to")
    data_dir: str | None = opt(None, "stage 1's output; default: run_dir/data")
    store_dir: str | None = opt(None, "stage 2's output: a folder or URL (s3://bucket/store); default: run_dir/store")
    seed: int = opt(0, "seed of sampling, initial weights and data order", at_least=0, at_most=2**62)
    overwrite: bool = opt(False, "replace outputs that were made from other inputs")
    regenerate: bool | None = opt(None, "let the target answer the prompts; default: yes if only prompts are given")
    push: bool = opt(False, "export: upload to the Hugging Face Hub")
    repo: str | None = opt(None, "export: hub repository, e.g. me/my-eagle31-draft")
    private: bool = opt(False, "export: make the hub repository private")
    license: str | None = opt(None, "export: licence of the weights on their card, as the hub spells it: apache-2.0")
    export_format: str = opt("vllm", "export: speculators names the target; sglang is for SGLang and vLLM", EXPORTS)
    export_sliding_window: int | None = opt(None, "evaluate, export: limit attention to so many tokens", above=0)
    export_vocab_size: int | None = opt(None, "evaluate, export: keep so many draft tokens, the most used", at_least=1)
    comparisons: list[str] = opt([], "export: output folders of `eagle31 compare`, for the model card")
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    extract: ExtractConfig = field(default_factory=ExtractConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def target_name(self) -> str:
        """The target's name in an export: its public name or, if `vllm serve FOLDER` must find it, its local folder."""
        here = self.export_format == "speculators" and not self.target.is_hub_id
        return str(Path(self.target.path).resolve()) if here else self.target.name

    @property
    def writes_prompts(self) -> bool:
        """Whether the target writes the prompts and answers them."""
        return bool(self.regenerate) and self.data.writes_prompts

    @property
    def data_folder(self) -> Path:
        return Path(self.data_dir or Path(self.run_dir) / "data")

    @property
    def train_folder(self) -> Path:
        return Path(self.run_dir) / "train"

    @property
    def store_location(self) -> str:
        """The store that stage 2 writes and later stages read: a folder or a URL."""
        return self.store_dir or str(Path(self.run_dir) / "store")

    @property
    def cache_folder(self) -> Path:
        return Path(self.store.cache_dir or Path(self.run_dir) / "cache")


# ---------------------------------------------------------------- what stages hand over


@dataclass(frozen=True)
class DrafterShape:
    """A drafter's complete architecture: DrafterConfig filled in from its target. Saved as `drafter.json`."""

    architecture: str
    hidden_size: int  # D
    target_hidden_size: int  # H
    aux_layers: list[int]  # inputs of layer i; A = len(aux_layers)
    vocab_size: int  # V
    draft_vocab_size: int  # Vd
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    fc_norm: bool
    norm_output: bool
    norm_before_residual: bool
    share_embedding: bool
    norm_before_fc: bool = False
    num_layers: int = 1
    qk_norm: bool = False
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    parallel: bool = False
    ptd_token_id: int | None = None  # parallel drafters only
    # MLA only
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    @property
    def norms_states(self) -> bool:
        """Whether the target's auxiliary states are normalized before fc."""
        return self.fc_norm or self.norm_before_fc


def default_aux_layers(layers: int) -> list[int]:
    """Return vLLM's choice for a target of N layers: 2, N//2, N-3."""
    return [2, layers // 2, layers - 3]


MLA_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # q_lora_rank may be null


def mla_widths(of: DrafterConfig | DrafterShape) -> tuple[int, int, int, int]:
    """Return MLA's widths: latent, key without position, key with position, value. UserError if one is missing."""
    if missing := [f"drafter.{name}" for name in MLA_WIDTHS if getattr(of, name) is None]:
        raise UserError(
            f"drafter.architecture=mla needs {', '.join(missing)}, which only a target with MLA has: set them"
        )
    latent, nope, rope, value = (getattr(of, name) for name in MLA_WIDTHS)
    return latent, nope, rope, value
