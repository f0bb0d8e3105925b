"""What of the benchmarks needs no peer and no GPU: eager attention, pictures, scale, and a dry run."""

import json
import tracemalloc

import pytest
import torch
from made import Made, message_of
from whole import encode

from benchmarks import codecs, contenders, gpu, scale
from benchmarks import pictures as redrawn
from benchmarks.shapes import Case, make_material, turns
from eagle31_train.api import open_store
from eagle31_train.model import drafter
from eagle31_train.store.codec import CODECS


@pytest.mark.parametrize("name", ["tiny", "tiny-mla"])
def test_eager_attention_computes_the_same(name, monkeypatch):
    monkeypatch.setattr(drafter, "unrolled_attention", drafter.unrolled_attention)  # it is replaced, and put back here
    material = make_material(Case(name, 64, 0.5).drafter(), turns(64, 0.5))
    gradients = []
    for contender in ("ours", "ours, eager attention"):
        built = contenders.build(contender, material, 7)
        built.loss().backward()
        gradients.append({key: parameter.grad.clone() for key, parameter in built.parameters().items()})
        contenders.drop_gradients(built)
    ours, eager = gradients
    assert all(torch.norm(ours[key] - eager[key]) < 1e-5 * torch.norm(eager[key]) for key in ours)


def test_every_stored_picture_is_drawn_again_by_one_command(tmp_path, monkeypatch):
    shown = {file.stem for file in redrawn.RESULTS.glob("*.png")}
    shown |= {file.stem.removesuffix("-light") for file in redrawn.README.glob("*-light.svg")}
    assert shown | {"speedrun"} == redrawn.DRAWN.keys()
    monkeypatch.setattr(redrawn, "README", tmp_path)
    for name in ("gain", "codecs", "mla", "peers", "study-serving"):
        redrawn.DRAWN[name](tmp_path / f"{name}.png")
    assert len(list(tmp_path.iterdir())) == 4 + 2


def test_a_codec_is_compared_with_the_stored_states(tmp_path):
    made = Made({"train": [6], "heldout": [9, 2, 12]}, hidden=40)
    made.write(tmp_path / "exact")
    store = open_store(tmp_path / "exact")
    rows = {row["codec"]: row for row in codecs.measure(store, "heldout", 20)}
    assert set(rows) == set(CODECS)
    assert (rows["bf16"]["kl"], rows["bf16"]["top1"]) == (0, 1)
    assert set(map(tuple, rows["bf16"]["aux"].values())) == {(0, 0)}

    def logits(last):
        normed = torch.nn.functional.rms_norm(last.float(), (40,), made.weights["norm"], 1e-5)
        return torch.distributions.Categorical(logits=normed @ made.weights["lm_head"].float().T)

    errors, divergences = [], []
    for index in (0, 2):  # nothing is taught in two tokens
        sample = store.sample("heldout", index)
        exact, lost = (aux[:, 1].float() for aux in (sample.aux, encode(sample.aux, "int4").decode()))
        errors.append(((lost - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())
        both = (logits(last) for last in (sample.last, encode(sample.last, "int4").decode()))
        divergences.append(torch.distributions.kl_divergence(*both).mean())
    assert rows["int4"]["aux"][3][0] == pytest.approx(sum(errors).item() / 2)
    assert rows["int4"]["kl"] == pytest.approx(sum(divergences).item() / 2, rel=1e-4)
    Made(aux_codec="int8_channel").write(tmp_path / "rounded")
    assert "extract with bf16 for both" in message_of(codecs.measure, open_store(tmp_path / "rounded"), "heldout", 20)


def test_a_training_begins_with_so_few_bytes_a_sample_that_ten_million_fit_into_2_gib(tmp_path):
    lengths, samples = scale.draw_lengths(30_000), 30_000
    scale.extract(lambda _, work: work(), lengths, samples // 100, tmp_path)
    lengths.clear()
    most = {}

    def watch(what, work):
        tracemalloc.reset_peak()
        result = work()
        most[what] = tracemalloc.get_traced_memory()[1] / samples
        return result

    tracemalloc.start()
    split, schedule = scale.start_training(watch, tmp_path)
    tracemalloc.stop()
    assert (len(split), sorted(i for batch in schedule for i in batch)) == (samples, list(range(samples)))
    opening = most.pop("training opens the store")
    assert 8 < opening < 220  # with up to 100,000 pieces of JSON that are encoded at once
    assert 8 < max(most.values()) < 150  # beside half a gigabyte of libraries


def test_a_dry_run_measures_steps_kernels_and_lengths(tmp_path):
    out = tmp_path / "gpu"
    small = ["--device=cpu", "--quick", "--repeats=2", "--first=32", "--ceiling=64", "--cases=tiny:2x32:0.5"]
    results = gpu.run(gpu.options([*small, f"--out={out}"]))
    written = json.loads(out.with_name("gpu.json").read_text())
    plain, recomputed = results["steps"]
    assert (plain["tokens"], plain["assistant_tokens"], len(plain["all_seconds"])) == (64, 32, 2)
    assert plain["losses"][-1] < plain["losses"][0]  # the steps learn, with the optimizer
    torch.testing.assert_close(plain["losses"], recomputed["losses"], rtol=1e-3, atol=1e-3)
    assert plain["of_measured"] == pytest.approx(plain["flops_per_second"] / results["device"]["measured_rate"])
    assert sum(plain["kernels"]["groups"].values()) == pytest.approx(1)
    assert [found["tokens"] for found in results["longest"]] == [64]
    assert written == results
    assert "tiny:2x32:0.5, plain+recompute" in gpu.table(results)
