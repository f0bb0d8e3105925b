"""What these tests ask of vLLM. Run by the python of vLLM's own environment:

    .venv-vllm/bin/python tests/vllm/inside.py

Importing vLLM takes three times as long as starting its engine on a small target, so this imports it once. Each line of
standard input is then done by a forked process, to which nothing is left of those before, and answered by its exit
status: {"task", "requests": file of a list, "answers": file to be written, "log": file of what vLLM says,
"environment"}. The task is a function below, which takes one of the requests; its docstring has the fields of both.
"""

import atexit
import gc
import json
import os
import sys
import time
import traceback
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on the core that vLLM binds them to wait for each other
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process that forks should have no threads
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # even eagerly vLLM compiles one function, of ranks
os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")  # with AMX vLLM would round the inputs of INT4 layers to 8 bits
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":  # it asks for a Triton for CPUs: the interpreter is one
    from triton.backends import backends
    from triton.runtime.interpreter import InterpreterBuilder

    def store(self, pointers, value, mask, _):
        """The interpreter's, which takes no mask of integers."""
        return interpreter.store(pointers.data, value.data, mask.data.astype(bool))

    interpreter = sys.modules[InterpreterBuilder.__module__]._interpreter
    InterpreterBuilder.create_masked_store = store
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
# Of MLA, where there is any: on CPUs with AMX vLLM takes one that has no float32.
ATTENTION = {"attention_backend": "CPU_MLA"}
# vLLM fills it with zeros first. VLLM_CPU_KVCACHE_SPACE=1, where a target of yours needs more, makes it a GiB.
CACHE = {"kv_cache_memory_bytes": 2**26}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

# ---------------------------------------------------------------- decoding, with a drafter and without

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "proposed": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "accepted_per_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


def decode(target, draft, draft_tokens, requests, model_impl="auto"):
    """Decode prompts one at a time, in float32: what others are in the batch then cannot change a number. The engine is
    not shut down, which takes as long as starting it: it ends with the process.

    Args:
        target: folder; or a draft that names its target, with `draft` null.
        requests: [{"prompt": [token ids], "max_new_tokens", "end_ids"}]
        model_impl: whose class of the target, as vLLM calls it.

    Returns:
        {"outputs": [[token ids]], "counters": [{"drafts", "proposed", "accepted", "accepted_per_position"}],
         "second_runner": whether it was vLLM's second model runner}
    """
    from vllm import LLM, SamplingParams

    speculation = None
    if draft:
        speculation = {"method": "eagle3", "model": draft, "num_speculative_tokens": draft_tokens, **ATTENTION}
        if "ptd_token_id" in json.loads((Path(draft) / "config.json").read_text(encoding="utf-8")):
            speculation["parallel_drafting"] = True
    llm = LLM(
        model=target,
        model_impl=model_impl,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_num_seqs=1,
        # Room for the last drafts: vLLM shortens drafts that would pass max_model_len, and takes those of the step
        # that is still under way for accepted.
        max_model_len=max(len(one["prompt"]) + one["max_new_tokens"] for one in requests) + 2 * (draft_tokens + 1),
        speculative_config=speculation,
        seed=0,
        **ATTENTION,
        **CACHE,
    )

    def tokens_of(one):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=one["max_new_tokens"], stop_token_ids=one["end_ids"], detokenize=False
        )
        prompt = {"prompt_token_ids": one["prompt"]}
        return list(llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids)

    tokens_of(requests[0])  # the first request also pays for what vLLM sets up lazily
    second = llm.llm_engine.vllm_config.use_v2_model_runner
    answer = {"outputs": [], "counters": [], "second_runner": second}
    before = counted(llm, draft_tokens)
    for one in requests:
        answer["outputs"].append(tokens_of(one))
        now = counted(llm, draft_tokens)
        answer["counters"].append(since(before, now))
        before = now
    return answer


def sample(target, draft, method, prompts, times):
    """Sample two tokens after each prompt, at temperature 1, in float32 and by the second runner: those after the first
    token are drafted.

    Args:
        draft: the second token is drafted by it.
        method: vLLM's draft_sample_method.
        prompts: [[token ids]]
        times: how often each is asked, with different seeds.

    Returns:
        {"outputs": [[two token ids] of each time, of each prompt], "accepted": how many first drafts were}
    """
    import triton.language as tl
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(x + 1.0))  # CUDA's is not interpreted
    llm = LLM(
        model=target,
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        max_num_seqs=16,
        max_model_len=max(map(len, prompts)) + 16,
        speculative_config={
            "method": "eagle3", "model": draft, "num_speculative_tokens": 1, "draft_sample_method": method
        },
        seed=0,
        **ATTENTION,
        **CACHE,
    )  # fmt: skip
    asked = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(times)]
    how = [SamplingParams(temperature=1, max_tokens=2, ignore_eos=True, seed=seed) for seed in range(len(asked))]
    outputs = [list(one.outputs[0].token_ids) for one in llm.generate(asked, how, use_tqdm=False)]
    each = [outputs[start : start + times] for start in range(0, len(outputs), times)]
    return {"outputs": each, "accepted": counted(llm, 1)["accepted"]}


def counted(llm, draft_tokens):
    """All that vLLM has counted since it started."""
    found = {"drafts": 0, "proposed": 0, "accepted": 0, "accepted_per_position": [0] * draft_tokens}
    for metric in llm.get_metrics():
        for ours, theirs in COUNTERS.items():
            if metric.name == theirs:
                found[ours] = list(metric.values) if ours == "accepted_per_position" else metric.value
    return found


def since(before, now):
    """What was counted between two readings."""
    per_position = zip(now["accepted_per_position"], before["accepted_per_position"], strict=True)
    changes = {name: now[name] - before[name] for name in ("drafts", "proposed", "accepted")}
    return {**changes, "accepted_per_position": [a - b for a, b in per_position]}


# ---------------------------------------------------------------- states of the vLLM engine, before any store


def states(options, conversations, too_long, file, exchange=False):
    """Run the engine on conversations.

    Args:
        options: [key=value]
        conversations: [[token ids]]
        too_long: token ids that the engine refuses.
        file: of safetensors, to be written: aux.N, last.N of each conversation, twice.N the last states of asking once
            more, and ids, logs, positions of the first conversation's reference.
        exchange: whether to plant that the first two conversations' rows are exchanged.

    Returns:
        {"name", "layers", "refusal": the message for too_long, "folder": of files that are handed over, "left": there,
         "exchanged": what is said of the exchange}
    """
    import torch
    from safetensors.torch import save_file

    from eagle31_train.common.errors import UserError
    from eagle31_train.compose import load_config
    from eagle31_train.targets.extraction import make_engine

    spare_numba()
    engine = make_engine(load_config(options))
    tokens = [torch.tensor(ids) for ids in conversations]
    tensors = {}
    for index, aux, last in engine.run(tokens):
        tensors |= {f"aux.{index}": aux.contiguous(), f"last.{index}": last.contiguous()}
    for index, _, last in engine.run(tokens):
        tensors[f"twice.{index}"] = last.contiguous()
    positions = torch.arange(0, len(tokens[0]) - 1, 3)
    reference = engine.reference(tokens[0], positions)
    save_file({**tensors, "ids": reference.ids, "logs": reference.own, "positions": positions}, file)
    refusal = None
    try:
        list(engine.run([torch.tensor(too_long)]))
    except UserError as error:
        refusal = str(error)
    return {
        "name": engine.name,
        "layers": engine.layers,
        "refusal": refusal,
        "folder": str(engine._folder),
        "left": [str(left) for left in engine._folder.iterdir()],
        "exchanged": exchanged(engine, tokens) if exchange else None,
    }


def exchanged(engine, tokens):
    """What the engine says where the rows of the first two conversations are each other's."""
    from eagle31_train.targets.vllm_worker import StatesWorker

    right = StatesWorker._pieces

    def wrong(*arguments):
        one, other, *rest = right(*arguments)
        return [replace(one, name=other.name), replace(other, name=one.name), *rest]

    with patch.object(StatesWorker, "_pieces", wrong):
        try:
            list(engine.run(tokens[:2]))
        except RuntimeError as error:
            return str(error)


def spare_numba():
    """vLLM looks for its kernels in all that modules hold, and trips over what the wrapper of numba's library holds."""
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return
    ffi._lib_fn_wrapper.get = lambda *_: None


# ---------------------------------------------------------------- what vLLM makes of a draft's files

FIELDS = "architectures hidden_size intermediate_size num_attention_heads num_hidden_layers vocab_size hidden_act"
FIELDS += " draft_vocab_size target_hidden_size num_aux_hidden_states rms_norm_eps max_position_embeddings"
FIELDS += " q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
FIELDS += " fc_norm norm_output norm_before_residual eagle_aux_hidden_state_layer_ids rope_parameters"
POSITIONS = 300
MARK = 12345.0


def draft(target, draft):
    """Configuration, construction and loading of a draft's folder: no engine, no key-value cache.

    Returns:
        {"eagle3": whether vLLM's class of the target gives hidden states to a draft,
         "window": of the draft's attention, "fields": {field of the configuration: value}, "eps": [of all norms],
         "scale": of the softmax, "interleaved", "cos_sin": [POSITIONS × (cos | sin)],
         "sums": {parameter: weighted sum},
         "left": {parameter that no tensor was loaded into: whether it is left at one}}
        or {"error": a line} where vLLM refuses it.
    """
    try:
        return read_draft(target, draft)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}


def read_draft(target, folder):
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.utils.torch_utils import set_default_torch_dtype

    prepare_vllm()
    config = EngineArgs(
        model=target,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        speculative_config={"method": "eagle3", "model": folder, "num_speculative_tokens": 3},
    ).create_engine_config()
    draft = config.speculative_config.draft_model_config
    fields = {name: getattr(draft.hf_config, name, "absent") for name in FIELDS.split()}
    fields = json.loads(json.dumps(fields))  # a copy: making the module renames the rope_type
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32), torch.no_grad():
        model = initialize_model(vllm_config=config, model_config=draft)
        parameters = dict(model.named_parameters())
        ones = {name for name, parameter in parameters.items() if bool((parameter == 1).all())}
        for parameter in parameters.values():
            parameter.fill_(MARK)
        get_model_loader(config.load_config).load_weights(model, draft)
    attention = model.model.layers[0].self_attn
    of_target, _ = get_model_architecture(config.model_config)
    return {
        "eagle3": supports_eagle3(of_target),
        "window": getattr(getattr(attention, "attn", None), "sliding_window", None),
        "fields": fields,
        "eps": sorted({m.variance_epsilon for m in model.modules() if type(m).__name__ == "RMSNorm"}),
        "scale": attention.scaling,
        "interleaved": not attention.rotary_emb.is_neox_style,
        "cos_sin": attention.rotary_emb.cos_sin_cache[:POSITIONS].tolist(),
        "sums": {name: weighted_sum(parameter) for name, parameter in parameters.items()},
        "left": {name: name in ones for name, p in parameters.items() if bool((p == MARK).any())},
    }


def classes(architectures):
    """vLLM's classes for some architectures, and which of them give hidden states to an EAGLE 3 draft.

    Returns:
        {architecture: [the class's name, whether it does]; null where vLLM has no class for it, or that lacks a package
         here}
    """
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    answer = dict.fromkeys(architectures)
    for name in ModelRegistry.models.keys() & answer.keys():
        try:
            found = ModelRegistry.models[name].load_model_cls()
            answer[name] = [found.__name__, supports_eagle3(found)]
        except ImportError:  # torchvision, which multimodal classes import
            continue
    return answer


@cache
def prepare_vllm():
    """What vLLM's worker does before it makes a model."""
    import tempfile

    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    torch.accelerator.empty_cache = lambda: None
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def weighted_sum(tensor):
    """A sum that notices a swapped row."""
    import torch

    flat = tensor.detach().double().flatten()
    return float((flat * torch.arange(1, len(flat) + 1)).sum())


# ---------------------------------------------------------------- what vLLM's own parsers read in answers


def text(parser, tokenizer, text, args, tools):
    """Parse an answer's text.

    Args:
        parser: kimi | hermes | llama
        tokenizer: folder
        args: template_args

    Returns:
        [thought or null, content or null, [[name, arguments as JSON text]]]
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.kimi_k2 import KimiK2Parser
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
    from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser

    tokenizer = tokenizer_of(tokenizer)
    asked = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice="auto" if tools else None
    )
    if parser == "kimi":
        ids = tokenizer.encode(text, add_special_tokens=False)
        kimi = KimiK2Parser(tokenizer, None, chat_template_kwargs=args)
        thought, content, calls = kimi.parse(text, asked, enable_auto_tools=True, model_output_token_ids=ids)
        return thought, content, [(call.name, call.arguments) for call in calls or []]
    tool_parser = {"hermes": Hermes2ProToolParser, "llama": Llama3JsonToolParser}[parser](tokenizer, None)
    found = tool_parser.extract_tool_calls(text, asked)
    return None, found.content, [(call.function.name, call.function.arguments) for call in found.tool_calls]


@cache
def tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


TASKS = {"decode": decode, "sample": sample, "states": states, "draft": draft, "classes": classes, "text": text}


def main():
    for module in ("entrypoints.llm", "v1.worker.cpu_worker", "model_executor.layers.quantization.online.base"):
        import_module(f"vllm.{module}")
    gc.collect()
    gc.freeze()  # or every collection in a child looks at all of vLLM's modules
    answer, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # vLLM prints, too
    for line in sys.stdin:
        asked = json.loads(line)
        if (child := os.fork()) == 0:
            do(**asked)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answer, flush=True)


def do(task, requests, answers, log, environment):
    """Do what a line asks and end this process, without the seconds that tidying up vLLM's modules takes."""
    status = 1
    try:
        with open(log, "w") as output:  # noqa: PTH123
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.update(environment)
        run(task, Path(requests), Path(answers))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # by which the engine of states removes its folder
        sys.stdout.flush()
        os._exit(status)


def run(task, requests, answers):
    found = []
    asked = json.loads(requests.read_text(encoding="utf-8"))
    for number, request in enumerate(asked, 1):
        began = time.perf_counter()
        found.append(TASKS[task](**request))
        if task == "states":
            gc.collect()  # an engine holds its key-value cache
        print(f"{task} {number} of {len(asked)}: {time.perf_counter() - began:.1f} s", flush=True)
    answers.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":  # vLLM's processes import this file again
    main()
