"""What training begins with, fresh or by `train.init_from`, and published drafts to begin with."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from made import message_of
from pipeline import VOCAB
from safetensors.torch import load_file, save_file

from eagle31_train.model import vocab
from eagle31_train.store import Store
from train import initial_weights
from train.build import build_objective, shape_of


def begin_fresh(run, *options, **states):
    """(objective, store, draft vocabulary) of a run that is given nothing to begin with; `states`: what its store says
    otherwise of the target's."""
    config, store = run.config(*options), Store(run.folder / "run" / "store")
    store.states.update(states)
    kept = vocab.read(config.data_folder / "vocab.safetensors")
    return build_objective(config, shape_of(config.drafter, store, kept), store, kept), store, kept


def begin(run, init, *options):
    """What training begins with by `train.init_from`, and would begin with without it; the lines that were said."""
    objective, store, kept = begin_fresh(run, *options)
    drafter, lines = objective.drafter, []
    fresh = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    source = initial_weights.open_source(run.config(f"train.init_from={init}", *options))
    initial_weights.refuse_other_kind(source, drafter.shape, store)
    with patch.object(initial_weights, "say", lines.append):
        initial_weights.copy_weights(source, kept, store, drafter)
    return SimpleNamespace(weights=drafter.state_dict(), fresh=fresh, store=store, said="\n".join(lines))


def refusal(run, init, *options):
    return message_of(begin, run, init, *options)


def edit(folder, out, tensors=None, **settings):
    """A copy of a published draft with some settings, and some tensors, of its own; None removes one."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text()) | settings
    (out / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    merged = load_file(out / "model.safetensors") | (tensors or {})
    save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, out / "model.safetensors")
    return out


def with_vocab(run, ids):
    vocab.write(run.folder / "run/data/vocab.safetensors", vocab.DraftVocab(np.array(ids, dtype=np.int64), VOCAB))
    return run
