"""How far answers are the target's own, counted during extraction, beside the same counted by hand."""

import pytest
import torch
from pipeline import make_run, tiny_config

from eagle31_train.extract import extract
from eagle31_train.store import Store
from eagle31_train.store.document import Document
from eagle31_train.targets.extraction import FOREIGN, Agreement

VOCAB = 40


def document(tokens, mask, top1):
    states = torch.zeros(len(tokens), 1, 4)
    return Document(
        torch.tensor(tokens), torch.tensor(mask, dtype=torch.bool), torch.tensor(top1), states, states[:, 0]
    )


def test_counts_by_hand():
    drafted = torch.zeros(VOCAB, dtype=torch.bool)
    drafted[:10] = True
    agreement = Agreement(drafted.numpy())
    # Supervised are positions 1 to 3: the next token is the assistant's, and one comes before.
    agreement.add([document([5, 6, 7, 8, 9], [0, 0, 1, 1, 1], [-1, 7, 30, 9, -1])])
    assert (agreement.positions, agreement.own, agreement.outside) == (3, 2, 1)
    (line, warning) = agreement.lines()
    assert "write 66.7% of the 3 answer tokens seen here; 33.3% of its choices" in line
    assert "can never be drafted" in warning
    assert Agreement(drafted.numpy()).lines() == []


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_the_warning_depends_on_the_share(share):
    tokens = list(range(12))
    top1 = [-1, *[t + 1 if t < 12 * share else 39 for t in range(1, 11)], -1]
    agreement = Agreement(torch.ones(VOCAB, dtype=torch.bool).numpy())
    agreement.add([document(tokens, [0] * 2 + [1] * 10, top1)])
    assert any("hardly its own" in line for line in agreement.lines()) == (share < FOREIGN)


def test_extraction_counts_and_says_it(tmp_path, capsys):
    make_run(tmp_path)
    extract(tiny_config(tmp_path))
    agreement, store = Agreement(torch.ones(VOCAB, dtype=torch.bool).numpy()), Store(tmp_path / "run" / "store")
    for split in ("train", "heldout"):
        samples = store.split(split)
        agreement.add(samples.read(i) for i in range(len(samples)))
    assert agreement.own / agreement.positions < FOREIGN  # the answers are random
    said = capsys.readouterr().out
    assert agreement.lines()[0].partition(";")[0] in said
    assert "WARNING: hardly its own answers" in said
