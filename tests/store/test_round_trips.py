"""Random samples through shards on the disk: what is read is what `Document` says is kept."""

import random
from dataclasses import replace

import pytest
import torch
from planting import instead_of
from whole import Whole, encode, encoded

from eagle31_train.store import document, make_plan, shard
from eagle31_train.store.codec import CODECS
from eagle31_train.store.document import Document
from eagle31_train.store.sealed import DamagedError
from eagle31_train.store.shard import ShardFile, write_shard
from eagle31_train.store.shard_plan import SPLITS, Shape, sample_size

VOCAB = 1000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_mask(rng, length):
    """A turn, which may be all, nothing, or one token; or any tokens."""
    begin, end = sorted(rng.choices(range(length + 1), k=2))
    share = rng.random()
    turns = [(begin, end), (0, length), (0, 0), (0, 1), (length - 1, length), None]
    turn = rng.choice(turns)
    return [turn[0] <= i < turn[1] if turn else rng.random() < share for i in range(length)]


def random_document(rng, generator, shape):
    length = rng.choice([1, 2, 3, rng.randint(1, 8), rng.randint(1, 90)])
    mask = torch.tensor(random_mask(rng, length))
    dtype, scale = rng.choice(DTYPES), 10.0 ** rng.randint(-3, 3)
    states = torch.randn(length, shape.aux_layers + 1, shape.hidden_size, generator=generator) * scale
    following = torch.cat([mask[1:], torch.tensor([False])])
    top1 = torch.randint(0, VOCAB, (length,), generator=generator)
    return Whole.of(
        tokens=torch.randint(0, VOCAB, (length,), generator=generator),
        loss_mask=mask,
        top1=torch.where(following, top1, -1),
        aux=states[:, :-1].to(dtype),
        last=states[:, -1].to(dtype),
    )


def kept(document, shape):
    """What a reader must get, by the words of the contract: (aux [C, A, H], last [M, H])."""
    mask = document.loss_mask.tolist()
    teaches = [p for p in range(1, len(mask) - 1) if mask[p + 1]]
    # Slots stand before what they are taught: the last one is at the last such position but one.
    attended = [p for p in range(len(mask)) if teaches and p < teaches[-1]]
    rows = [(document.all_aux, attended, shape.aux_codec), (document.all_last, teaches, shape.last_codec)]
    return [encode(states[positions], codec).decode() for states, positions, codec in rows]


def check_document(read, document, shape):
    for name in ("tokens", "loss_mask", "top1"):
        ours, theirs = getattr(read, name), getattr(document, name)
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip((read.aux, read.last), kept(document, shape), strict=True):
        assert ours.width == shape.hidden_size
        assert ours.decode().shape == theirs.shape
        assert torch.equal(ours.decode(), theirs)


def round_trips(folder, seed, samples):
    """At least so many samples, in stores of a few shards; returns how many shards there were."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    done = shards = 0
    while done < samples:
        codecs = rng.choice(list(CODECS)), rng.choice(list(CODECS))
        hidden = rng.choice([1, 7, 32, 33, 64, 128, 129, rng.randint(1, 200)])
        shape = Shape(hidden, rng.randint(1, 4), *codecs)
        documents = [random_document(rng, generator, shape) for _ in range(rng.randint(1, 120))]
        parts = {"train": documents, "heldout": documents[: rng.randint(0, 5)]}
        masks = {split: [d.loss_mask.tolist() for d in parts[split]] for split in SPLITS}
        plan = make_plan(masks, rng.choice([1, 50, 500, 5000]), shape)
        for planned in plan.shards:
            mine = parts[planned.split][planned.first : planned.end]
            path = folder / "shard.safetensors"
            write_shard(path, [encoded(d, shape.aux_codec, shape.last_codec) for d in mine])
            size, head = path.stat().st_size, int.from_bytes(path.read_bytes()[:8], "little") + 8
            assert size <= planned.bytes
            assert size - head == sum(sample_size(d.loss_mask.tolist(), shape)[1] for d in mine)
            file = ShardFile(path, plan.lengths[planned.split][planned.first : planned.end], shape, VOCAB)
            for index in rng.sample(range(len(mine)), len(mine)):
                check_document(file.read(index), mine[index], shape)
                without = file.read(index, states=False)
                assert torch.equal(without.tokens, mine[index].tokens)
                assert not len(without.aux)
                assert not len(without.last)
            done, shards = done + len(mine), shards + 1
    return shards


@pytest.mark.parametrize("samples", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_samples_are_read_as_they_were_written(tmp_path, samples):
    assert round_trips(tmp_path, 0, samples) > samples / 50


@instead_of(shard, "_find_rows")
def states_of_the_neighbour(right, *given):
    tokens, aux, last = right(*given)
    return tokens, aux[1:] + aux[-1:], last


@instead_of(Document, "of")
def last_one_position_early(right, tokens, loss_mask, top1, aux, last):
    return right(tokens, loss_mask, top1, aux, last.roll(1, 0))


def scale_of_the_neighbour(axis):
    @instead_of(shard, "concatenate")
    def plant(right, parts):
        joined = right(parts)
        return replace(joined, scale=joined.scale.roll(1, axis))

    return plant


@instead_of(Document, "of")
def layers_in_another_order(right, tokens, loss_mask, top1, aux, last):
    return right(tokens, loss_mask, top1, aux.flip(1), last)


attended = instead_of(document, "attended_positions")
MISTAKES = {
    "states of the neighbour": states_of_the_neighbour,
    "aux one row short": attended(lambda right, supervised: max(0, right(supervised) - 1)),
    "aux of all positions": attended(lambda *_: VOCAB),
    "last one position early": last_one_position_early,
    "layers in another order": layers_in_another_order,
    "a block's scale for the next one's": scale_of_the_neighbour(-1),
    "a row's scale for the next one's": scale_of_the_neighbour(0),
}


@pytest.mark.parametrize("plant", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_planted_mistake_is_found(tmp_path, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises((AssertionError, DamagedError)):
        round_trips(tmp_path, 0, 300)
