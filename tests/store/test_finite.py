"""NaN and infinities planted in every kind of tensor of a store, of every codec, with checksums that are right."""

from dataclasses import replace

import pytest
import torch
from made import Made, message_of, problems
from pipeline import reseal
from safetensors.torch import load_file
from whole import encode

from eagle31_train.store import Store
from eagle31_train.store.codec import CODECS
from eagle31_train.store.format import TARGET, TRAJECTORIES
from eagle31_train.store.tensors import save_file

pytestmark = pytest.mark.usefixtures("no_power_is_lost")
NAN, INF = float("nan"), float("inf")
PLANTED = [
    (codec, f"{of}.{part}")
    for codec, how in CODECS.items()
    for of in ("aux", "last")
    for part, there in (("values", how.dtype.is_floating_point), ("scale", how.block), ("channels", how.channels))
    if there
]


def made(codec="bf16"):
    return Made({"train": [9, 4, 6], "heldout": [5, 3]}, 16, codec, codec)


def plant(file, name, value, row=-1):
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensor = tensors[name]
    if tensor.dtype == torch.float8_e4m3fn:
        # It has two NaNs, and no infinity. One value is enough.
        tensor.view(torch.uint8)[row, ..., -1] = 0xFF if value == -INF else 0x7F
    else:
        tensor[row] = value
    save_file(tensors, file)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(("codec", "name"), PLANTED)
def test_states_and_scales_that_are_not_finite_are_found_with_their_sample(tmp_path, codec, name, value):
    stored = made(codec)
    stored.write(tmp_path)
    shard = stored.plan.of("train")[0]
    plant(tmp_path / shard.name, name, value)
    reseal(tmp_path)
    last = shard.end - 1
    assert problems(tmp_path) == [f"the store/{shard.name} holds states that are not finite, in sample {last} of train"]
    document = Store(tmp_path).split("train").read(last)
    assert not (document.aux.finite and document.last.finite), "by which a training names the sample"


@pytest.mark.parametrize("codec", [codec for codec, how in CODECS.items() if how.block])
def test_scales_that_are_finite_and_decode_to_what_is_not_are_found(codec):
    encoded = encode(torch.linspace(-1, 1, 3 * 130).view(3, 130), codec)
    assert encoded.finite
    largest = torch.finfo(torch.bfloat16).max
    scale = encoded.scale.clone()
    scale[1, 0] = largest / 2
    harmed = replace(encoded, scale=scale)
    assert not harmed.decode().isfinite().all()
    assert not harmed.finite
    scale[1, 0] = largest / 100  # too large for the largest value that there could be, and not for those that are
    assert replace(encoded, scale=scale, values=torch.zeros_like(encoded.values)).finite


@pytest.mark.parametrize(
    ("file", "name"), [(TARGET, "embed_tokens"), (TARGET, "norm"), (TARGET, "lm_head"), (TRAJECTORIES, "0.aux")]
)
@pytest.mark.parametrize("value", [NAN, INF])
def test_tensors_beside_the_shards_that_are_not_finite_are_neither_written_nor_read(tmp_path, file, name, value):
    writer = made().write(tmp_path)
    writer.write_tensors(TRAJECTORIES, {"0.prompt": torch.tensor([1, 2]), "0.aux": torch.ones(1, 2, 16)})
    assert problems(tmp_path) == []
    plant(tmp_path / file, name, value)
    reseal(tmp_path)
    found = f"{file} holds {name} with values that are not finite"
    assert problems(tmp_path) == [f"the store/{found}"]
    assert found in message_of(lambda: (Store(tmp_path).target, Store(tmp_path).trajectories))
    assert writer.has_trajectories == (file == TARGET), "an extraction makes them anew"
    new = made().writer(tmp_path / "new")
    said = message_of(new.write_tensors, file, load_file(tmp_path / file))
    assert f"would hold {name} with values that are not finite" in said
    assert not (tmp_path / "new" / file).exists()
