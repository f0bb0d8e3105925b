"""Training a peer as a run of ours was: what it is given, what both share, and, with the peer at hand, the whole."""

from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from pipeline import AUX, LENGTHS, make_run, tiny_config, tiny_llama

from benchmarks import peer_store
from eagle31_train.extract import extract
from eagle31_train.model import vocab
from eagle31_train.store import Store
from eagle31_train.store.document import Document
from train import loop

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / ".venv-peers" / "bin" / "python"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run of ours, trained for some steps."""
    folder = tmp_path_factory.mktemp("like")
    make_run(folder)
    extract(tiny_config(folder))
    loop.train(tiny_config(folder, "train.max_steps=4"))
    return folder / "run"


# ---------------------------------------------------------------- what the peer is given


@pytest.mark.parametrize("text", ["0011101", "1110011", "11", "1", "0000", "0001"])
def test_the_peer_learns_what_its_mask_and_our_store_have_in_common(text):
    loss_mask = torch.tensor([letter == "1" for letter in text])
    states = torch.zeros(len(text), 1, 1)
    ours = Document(torch.zeros(len(text)), loss_mask, torch.zeros(len(text)), states, states[:, 0])
    expected = [int(bool(loss_mask[j])) if j in ours.supervised.tolist() else 0 for j in range(len(text))]
    assert peer_store.taught_mask(loss_mask).tolist() == expected


def test_states_lie_where_the_peer_looks_for_them(run):
    store = Store(run / "store")
    model = tiny_llama()
    hidden = []
    model.model.layers[-1].register_forward_hook(lambda _m, _i, output: hidden.append(output))
    for index, document in enumerate(store.split("train").read_all(range(len(LENGTHS["train"])))):
        found = peer_store.sample(document)
        with torch.no_grad():
            states = model(document.tokens[None], output_hidden_states=True).hidden_states
        aux, last = torch.stack([states[i][0] for i in AUX], 1), hidden[-1].reshape(len(document), -1)
        assert found["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(found["token_ids"], document.tokens)
        mask = peer_store.taught_mask(document.loss_mask).bool()
        assert mask.any() or len(document) < 6, index
        torch.testing.assert_close(found["hidden_states"][mask, -1], last[mask].bfloat16())
        # Its row i reads slot i and is taught by i+1; later rows attend to all before them.
        slots = int(mask.nonzero().max()) if mask.any() else 0
        torch.testing.assert_close(found["hidden_states"][:slots, :-1], aux[:slots].bfloat16())


def test_the_data_set_is_the_training_split_and_some_of_the_held_out(run, tmp_path):
    store, kept = Store(run / "store"), vocab.read(run / "data" / "vocab.safetensors")
    found = peer_store.write(store, kept, tmp_path / "data", validate=3)
    rows = load_from_disk(str(tmp_path / "data"))
    train = len(LENGTHS["train"])
    assert rows["seq_len"][:].tolist() == [*LENGTHS["train"], *LENGTHS["heldout"][:3]]
    assert found["samples"] == {"train": train, "heldout": 3}
    assert found["tokens"] == sum(LENGTHS["train"])
    assert found["taught"] == sum(int(rows[i]["loss_mask"].sum()) for i in range(train))
    assert found["mask"] > found["taught"]
    assert int(len(rows) * peer_store.ratio(found["samples"])) == train  # as the peer cuts it
    samples = peer_store.Samples(run / "store")
    for i in range(len(rows)):  # else it would leave them out, and only warn
        assert torch.equal(samples.get_cached(i)["token_ids"], rows[i]["input_ids"])


# ---------------------------------------------------------------- what both share


# ---------------------------------------------------------------- what comes of it
