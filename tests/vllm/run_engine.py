"""The states that the vLLM engine gives, before any store. Run by the python of vLLM's own environment:

    .venv-vllm/bin/python tests/vllm/run_engine.py REQUEST.json STATES.safetensors ANSWER.json

REQUEST: {"options": [key=value], "conversations": [[token ids]], "too_long": [token ids]}
STATES: aux.N, last.N of each conversation, twice.N the last states of asking once more, and ids, logs, positions of the
first conversation's reference.
ANSWER: {"readout": {...}, "refusal": the message for too_long, "left": files left behind}
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


def main(request_file, states_file, answer_file):
    import torch
    from safetensors.torch import save_file

    from eagle31_train.cli import load_config
    from eagle31_train.schema import UserError
    from eagle31_train.targets.engine import make_engine

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
    readout = engine.readout
    answer = {
        "name": engine.name,
        "layers": engine.layers,
        "readout": {"norm": readout.norm.tolist(), "kind": readout.norm_kind, "eps": readout.eps, "tied": readout.tied},
        "refusal": refusal,
        "left": [str(file) for file in engine._folder.iterdir()],
        "folder": str(engine._folder),
    }
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
