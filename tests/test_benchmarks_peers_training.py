"""Training a peer as a run of ours was: what it is given, what both share, and, with the peer at hand, the whole."""

import json
import shutil
import subprocess
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from pipeline import AUX, KEPT, LENGTHS, make_run, tiny_config, tiny_llama
from safetensors.torch import load_file

from benchmarks import peer_store
from benchmarks.peer_training import METRICS, Ours, finish
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.errors import UserError
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


def chosen(out, **changes):
    given = {
        "out": out,
        "steps": 5,
        "seed": 7,
        "lr": None,
        "validate": 2,
        "log_every": 1,
        "theirs": [],
        "batch_tokens": 60,
    }
    return Namespace(**{**given, **changes})


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


@pytest.mark.parametrize(
    ("change", "said"),
    [({"architecture": "mla"}, "plain Llama"), ({"rope_scaling": {"rope_type": "yarn"}}, "plain Llama")],
)
def test_a_run_that_the_peer_cannot_train_is_refused(run, tmp_path, change, said):
    with pytest.raises(UserError, match=r"config\.yaml is missing"):
        Ours.read(tmp_path)
    (tmp_path / "train" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "train" / "config.yaml").write_text((run / "train" / "config.yaml").read_text())
    with pytest.raises(UserError, match="no checkpoint yet"):
        Ours.read(tmp_path)
    shape = {**asdict(Ours.read(run).shape), **change}
    (tmp_path / "train" / "checkpoints" / "step-000001" / "drafter.json").write_text(json.dumps(shape))
    with pytest.raises(UserError, match=said):
        Ours.read(tmp_path)


# ---------------------------------------------------------------- what comes of it


def test_only_a_whole_training_leaves_a_draft(tmp_path):
    last = tmp_path / "checkpoints" / "1"
    last.mkdir(parents=True)
    (last / "config.json").write_text("{}")
    (last / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match="stopped before step 5"):
        finish(tmp_path, 2, 5)
    (last / "training_state.json").write_text(json.dumps({"global_step": 5}))
    for left_out, fails in [(1.0, True), (0.0, False)]:
        lines = [{"step": 0, "train": {"error_records": left_out}}, {"step": 5, "val": {}}]
        (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        if fails:
            with pytest.raises(UserError, match="left samples out"):
                finish(tmp_path, 2, 5)
    assert (finish(tmp_path, 2, 5) / "model.safetensors").read_bytes() == b"weights"
    assert not (tmp_path / "draft" / "training_state.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(not PEER.exists(), reason="benchmarks/install_peers.sh .venv-peers has not been run")
def test_the_peer_trains_from_our_store_and_we_read_its_draft(run, tmp_path):
    def train(*more):
        words = ["-m", "benchmarks.peer_training", "--like", str(run), "--out", str(tmp_path / "peer"), *more]
        return subprocess.run([str(PEER), *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)

    done = train("--steps", "7", "--log-every", "1", "--validate", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "peer" / "peer.json").read_text())
    assert result["steps"] == 7
    assert result["epochs"] > 1
    lines = [json.loads(line) for line in (tmp_path / "peer" / METRICS).read_text().splitlines()]
    assert sum("train" in line for line in lines) == 7
    assert [sum("val" in line for line in lines)] == [result["epochs"]]

    ours = Ours.read(run)
    draft = DrafterCheckpoint.open(tmp_path / "peer" / "draft", target_layers=lambda: 6)
    assert replace(draft.shape, share_embedding=True) == ours.shape
    assert draft.vocab.target_ids.tolist() == KEPT
    head = load_file(run.parent / "target" / "model.safetensors")["lm_head.weight"][KEPT]
    torch.testing.assert_close(draft.tensors["lm_head.weight"], head.bfloat16())  # it keeps it frozen
    first = load_file(tmp_path / "peer" / "checkpoints" / "0" / "model.safetensors")
    assert not torch.equal(first["fc.weight"], draft.tensors["fc.weight"])
    norms = [draft.tensors[f"fc_norm.{i}.weight"] for i in range(3)]
    assert any(not torch.equal(norm, torch.ones_like(norm)) for norm in norms)

    assert "finished" in train("--steps", "7", "--log-every", "1").stdout

    (tmp_path / "peer" / "peer.json").unlink()
    shutil.rmtree(tmp_path / "peer" / "checkpoints" / str(result["epochs"] - 1))
    again = train("--steps", "7", "--log-every", "1", "--validate", "2")
    assert again.returncode == 0, again.stderr[-3000:]
    assert json.loads((tmp_path / "peer" / "peer.json").read_text())["resumed"]
    assert sum("train" in json.loads(line) for line in (tmp_path / "peer" / METRICS).open()) < 14

    refused = train("--steps", "8")
    assert refused.returncode == 1
    assert refused.stderr.strip().startswith("error: ")
    assert "other options" in refused.stderr
