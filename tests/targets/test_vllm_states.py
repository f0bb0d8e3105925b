"""Rows of steps are sorted into conversations: chunks, batches, padding, generated tokens, work done again."""

import pytest
import torch
from safetensors.torch import load_file

from eagle31_train.targets import vllm_states
from eagle31_train.targets.vllm_states import BEHIND, CANNOT, Piece, StatesWriter

LAYERS, HIDDEN = 3, 4
LENGTHS = {"0": 5, "1": 3, "2": 9}
# Of each step: (conversation, start, count). A long one comes in chunks among the others; 1 is thrown out and done
# again; after its last token a conversation generates one, which is nobody's.
STEPS = [
    [("0", 0, 5), ("1", 0, 2), ("2", 0, 1)],
    [("2", 1, 4), ("0", 5, 1)],
    [("1", 0, 3)],
    [("1", 3, 1), ("2", 5, 4)],
]


def made(name, device="cpu"):
    """States [L, T + 1, H] and tokens [T + 1] of a conversation, the last row a generated token's."""
    generator = torch.Generator().manual_seed(int(name))
    count = LENGTHS[name] + 1
    return (
        torch.randn(LAYERS, count, HIDDEN, generator=generator).bfloat16().to(device),
        torch.randint(0, 99, (count,), generator=generator, dtype=torch.int32).to(device),
    )


def step(pieces, device="cpu", padding=2):
    """What a step gives to `StatesWriter.add`: one flat batch, padded."""
    rows = [
        (states[:, a : a + n], tokens[a : a + n]) for name, a, n in pieces for states, tokens in [made(name, device)]
    ]
    states = torch.cat([*[s for s, _ in rows], torch.full((LAYERS, padding, HIDDEN), 7.0, device=device).bfloat16()], 1)
    tokens = torch.cat([*[t for _, t in rows], torch.full((padding,), -1, dtype=torch.int32, device=device)])
    return list(states), tokens, [Piece(name, a, n, LENGTHS[name]) for name, a, n in pieces]


def written(folder):
    """Fails unless each conversation's file holds its states and tokens."""
    assert {file.name for file in folder.iterdir()} == {f"{name}.safetensors" for name in LENGTHS}
    for name, length in LENGTHS.items():
        read, (states, tokens) = load_file(folder / f"{name}.safetensors"), made(name)
        assert torch.equal(read["hidden_states"], states[:, :length])
        assert torch.equal(read["token_ids"], tokens[:length].long())


def write_all(folder, device="cpu", relabel=lambda pieces: pieces):
    """All steps through a writer, each in the same memory as the one before, as outputs of CUDA graphs are."""
    writer = StatesWriter(folder)
    for pieces in STEPS:
        layers, tokens, whose = step(pieces, device)
        writer.add(layers, tokens, relabel(whose))
        assert len(writer._pending) <= BEHIND, "or states pile up in memory where the disk is slow"
        for buffer in (*layers, tokens):
            buffer.fill_(0)
    writer.flush()


def test_each_conversation_gets_its_rows_and_a_planted_exchange_of_two_is_seen(tmp_path):
    write_all(tmp_path)
    written(tmp_path)
    write_all(tmp_path, relabel=lambda whose: [*whose[1::-1], *whose[2:]] if len(whose) == 3 else whose)
    with pytest.raises(AssertionError):
        written(tmp_path)


def test_positions_that_were_not_computed_are_missed(tmp_path):
    writer = StatesWriter(tmp_path)
    writer.add(*step([("2", 0, 2)]))
    writer.add(*step([("2", 4, 5)]))
    with pytest.raises(RuntimeError, match="left out tokens 2 to 4 of a conversation"):
        writer.flush()


def test_a_disk_that_is_full_ends_the_engine_and_leaves_no_file_that_looks_whole(tmp_path, monkeypatch):
    def full(tensors, file):
        file.write_bytes(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(vllm_states, "save_file", full)
    writer = StatesWriter(tmp_path)
    writer.add(*step([("0", 0, 5)]))
    with pytest.raises(RuntimeError, match=CANNOT):
        writer.flush()
    assert not list(tmp_path.glob("*.safetensors"))
