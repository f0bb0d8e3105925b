"""The states that the vLLM engine gives, before any store. Run by the python of vLLM's own environment:

    .venv-vllm/bin/python tests/vllm/run_engine.py REQUEST.json STATES.safetensors ANSWER.json

REQUEST: {"options": [key=value], "conversations": [[token ids]], "too_long": [token ids], "exchange": whether to plant
that the first two conversations' rows are exchanged}
STATES: aux.N, last.N of each conversation, twice.N the last states of asking once more, and ids, logs, positions of the
first conversation's reference.
ANSWER: {"name", "layers", "refusal": the message for too_long, "left": files left behind, "exchanged": what is said of
the exchange}
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


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


def main(request_file, states_file, answer_file):
    import torch
    from safetensors.torch import save_file

    from eagle31_train.cli import load_config
    from eagle31_train.errors import UserError
    from eagle31_train.targets.extraction import make_engine

    spare_numba()
    request = json.loads(Path(request_file).read_text())
    engine = make_engine(load_config(request["options"]))
    tokens = [torch.tensor(ids) for ids in request["conversations"]]
    states = {}
    for index, aux, last in engine.run(tokens):
        states |= {f"aux.{index}": aux.contiguous(), f"last.{index}": last.contiguous()}
    for index, _, last in engine.run(tokens):
        states[f"twice.{index}"] = last.contiguous()
    positions = torch.arange(0, len(tokens[0]) - 1, 3)
    reference = engine.reference(tokens[0], positions)
    save_file({**states, "ids": reference.ids, "logs": reference.own, "positions": positions}, states_file)
    try:
        list(engine.run([torch.tensor(request["too_long"])]))
        refusal = None
    except UserError as error:
        refusal = str(error)
    left = [str(file) for file in engine._folder.iterdir()]
    answer = {
        "name": engine.name,
        "layers": engine.layers,
        "refusal": refusal,
        "left": left,
        "exchanged": exchanged(engine, tokens) if request.get("exchange") else None,
        "folder": str(engine._folder),
    }
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
