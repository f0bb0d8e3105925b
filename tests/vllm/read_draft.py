"""What vLLM reads of drafts: their configuration, and the module that it makes of one. By the python of vLLM's own:

    .venv-vllm/bin/python tests/vllm/read_draft.py REQUEST.json ANSWER.json

REQUEST: {"target" (of all) or {name: target}, "drafts": {name: folder}}
ANSWER: {name: {"class": vLLM's of the target, "eagle3": whether that gives hidden states to a draft,
                "window": of the draft's attention, "fields": {field of the configuration: value},
                "eps": [of all norms], "scale": of the softmax,
                "interleaved", "cos_sin": [POSITIONS × (cos | sin)], "sums": {parameter: weighted sum},
                "left": {parameter that no tensor was loaded into: whether it is left at one}}
         or {name: {"error": a line}} where vLLM refuses it}
No engine, no key-value cache: configuration, construction, loading.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

FIELDS = "architectures hidden_size intermediate_size num_attention_heads num_hidden_layers vocab_size hidden_act"
FIELDS += " draft_vocab_size target_hidden_size num_aux_hidden_states rms_norm_eps max_position_embeddings"
FIELDS += " q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
FIELDS += " fc_norm norm_output norm_before_residual eagle_aux_hidden_state_layer_ids rope_parameters"
POSITIONS = 300
MARK = 12345.0


def read(target, folder):
    """The facts of one draft."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.utils.torch_utils import set_default_torch_dtype

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
        "class": of_target.__name__,
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


def weighted_sum(tensor):
    """A sum that notices a swapped row."""
    import torch

    flat = tensor.detach().double().flatten()
    return float((flat * torch.arange(1, len(flat) + 1)).sum())


def main(request_file, answer_file):
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    request = json.loads(Path(request_file).read_text())
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker has it on a CPU
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    answer = {}
    targets = request["target"]
    for name, draft in request["drafts"].items():
        try:
            answer[name] = read(targets[name] if isinstance(targets, dict) else targets, draft)
        except Exception as error:
            answer[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        print(name, answer[name].get("error", "read"), flush=True)
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
