"""The parts of the store's benchmarks that are no timings: formats, transcoding, fidelity, and how numbers add up."""

import json
import statistics

import pytest
import torch
from pipeline import contents, make_run, tiny_config

from benchmarks import codecs, extraction, storage, transcode, turns
from benchmarks.formats import Ours, Safetensors, TorchSave, usage
from benchmarks.storage import Case
from benchmarks.transcode import EXACT, Pair
from eagle31_train.extract import extract
from eagle31_train.place import open_place
from eagle31_train.schema import UserError
from eagle31_train.store import Store
from eagle31_train.targets.make import make_engine

# ---------------------------------------------------------------- shared


def test_everyone_has_every_turn_and_the_first_place_goes_round():
    order = []
    found = turns.in_turns({n: lambda n=n: order.append(n) or len(order) for n in "abc"}, 2, "x", warm=1, first=1)
    assert "".join(order) == "bcacababc"
    assert found == {"a": [5, 7], "b": [6, 8], "c": [4, 9]}


def test_a_clock_counts_calls_where_they_are_made_and_goes_away():
    before = json.dumps
    with turns.clocked(part=(json, "dumps")) as seconds:
        assert json.dumps([1]) == "[1]"
        assert json.dumps is not before
    assert seconds["part"] > 0
    assert json.dumps is before


def test_results_are_written_whole(tmp_path):
    turns.write(tmp_path / "deep" / "out.v1", {"a": 1})
    assert contents(tmp_path) == {"deep/out.v1.json": b'{\n "a": 1\n}\n'}
    with pytest.raises(TypeError):
        turns.write(tmp_path / "deep" / "out.v1", {"a": object()})
    assert json.loads((tmp_path / "deep" / "out.v1.json").read_text()) == {"a": 1}


# ---------------------------------------------------------------- storage


@pytest.mark.parametrize("text", ["576", "576:0", "576:2", "0:1", "a:b"])
def test_a_case_that_cannot_be_is_named(text):
    with pytest.raises(UserError, match=text):
        Case.parse(text)


def test_lengths_and_batches_are_the_same_every_time():
    lengths = storage.draw_lengths(100_000)
    assert lengths == storage.draw_lengths(100_000)
    assert sum(lengths) - lengths[-1] < 100_000 <= sum(lengths)
    assert statistics.median(lengths) == pytest.approx(240, rel=0.1)
    batches = storage.make_batches(lengths, 4096)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in batch) for batch in batches) <= 4096
    assert storage.make_batches([5000, 10], 4096) in ([[0], [1]], [[1], [0]])


@pytest.mark.parametrize("kept", [Ours("bf16", "bf16", 128), Ours("int4", "int8", 128), TorchSave(True), Safetensors()])
def test_what_is_timed_gives_the_states_back(kept, tmp_path):
    documents = storage.make_documents(Case(40, 0.5), [60, 33, 90, 17])
    measured = storage.write_once(kept, documents, tmp_path / "kept")
    files, size = usage(tmp_path / "kept")
    assert files == (4 if not isinstance(kept, Ours) else 6 + 2)  # the small ones; shards
    assert size > 0
    kept.open(tmp_path / "kept")
    storage.check(kept, documents, [2, 0])
    with pytest.raises(AssertionError):
        storage.check(kept, [documents[3], *documents[1:]], [2, 0])
    read = storage.read_once(kept, tmp_path / "kept", [[2, 0], [1, 3]])
    assert (read["decode"] > 0) == isinstance(kept, Ours)
    parts = {name: seconds for name, seconds in measured.items() if name != "total"}
    assert sum(parts.values()) < measured["total"]
    assert set(parts) == (set(storage.PARTS) if isinstance(kept, Ours) else set())
    assert min(parts.values(), default=1) > 0  # whatever the writer calls by other names would be missing here


def test_bytes_copied_are_those_of_the_pieces():
    source = torch.arange(100, dtype=torch.uint8)
    kept = torch.zeros(60, dtype=torch.uint8)
    assert storage.copy_once(source, [60, 40], kept)["first"] > 0
    assert torch.equal(kept[:40], source[60:])


def test_rates_are_ratios_to_memcpy():
    read = {"open": 1.0, "first": 2.0, "again": 1.0, "decode": 0.5}
    ours = {"files": 6, "bytes": 1000, "batch_bytes": 800, "write": [{"total": 4.0, "encode": 1.0}], "read": [read]}
    slow = {"files": 9, "bytes": 2000, "batch_bytes": 0, "write": [{"total": 8.0}, {"total": 2.0}], "read": []}
    result = {"tokens": 100, "memcpy": {"fresh": 500.0, "warm": 1600.0}, "formats": {"ours": ours, "theirs": slow}}
    first, second = storage.numbers(result)
    assert first["bytes_per_token"] == 10
    assert first["write"] == 25
    assert first["write_parts"] == {"encode": 0.25}
    assert first["read"] == 50
    shares = {"first, fresh": 0.8, "again, fresh": 1.6, "first, warm": 0.25, "again, warm": 0.5}
    assert first["of_memcpy"] == shares
    assert first["decode"] == 200
    assert second["write"] == 20
    assert "read" not in second


# ---------------------------------------------------------------- extraction


def test_extraction_is_timed_by_its_own_parts(tmp_path):
    make_run(tmp_path)
    config = tiny_config(tmp_path)
    result = extraction.measure(config, ["bf16:bf16", "int4:int8"], 60, tmp_path / "stores")
    assert result["shards"] == [19, 34, 21]
    assert sum(result["shards"]) >= 60
    assert result["padded"] >= sum(result["shards"])
    rows = {row["name"]: row for row in extraction.numbers(result)}
    assert list(rows) == ["bare", "no mask", "states", "bf16:bf16", "int4:int8"]
    assert rows["bare"]["of_bare"] == 1.0
    for name in ("bf16:bf16", "int4:int8"):
        parts = rows[name]["parts"]
        assert sum(parts.values()) == pytest.approx(1)
        assert all(share > 0 for share in parts.values()), parts  # a part that the stage calls by another name is 0
    # What was timed is what an extraction writes.
    extract(tiny_config(tmp_path, "store.aux_codec=int4", "store.last_codec=int8"))
    whole = contents(tmp_path / "run" / "store" / "shards")
    timed = contents(tmp_path / "stores" / "int4-int8" / "shards")
    shards = [name for name in timed if name.endswith(".safetensors")]
    assert len(shards) == 3
    assert all(timed[name] == whole[name] for name in shards)


def test_the_bare_pass_is_the_decoder_without_hooks(tmp_path):
    make_run(tmp_path)
    engine = make_engine(tiny_config(tmp_path))
    calls = []
    handle = engine.target.decoder.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    assert extraction.bare(engine, [torch.tensor([1, 2, 3]), torch.tensor([4, 5])], masked=True)["total"] > 0
    assert extraction.bare(engine, [torch.tensor([1, 2, 3])], masked=False)["total"] > 0
    handle.remove()
    assert calls[0]["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert calls[1]["attention_mask"] is None
    assert not engine.target.final_norm._forward_pre_hooks


# ---------------------------------------------------------------- codecs


@pytest.mark.parametrize("text", ["fp8", "fp8:fp9", ":bf16"])
def test_a_pair_that_cannot_be_is_named(text):
    with pytest.raises(UserError, match=text):
        Pair.parse(text)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A run of a target in bf16, extracted in bf16."""
    folder = tmp_path_factory.mktemp("exact")
    make_run(folder)
    extract(tiny_config(folder, "target.dtype=bfloat16", "extract.gate_top1=0.5", "extract.gate_kl=1"))
    return folder


def coded(exact, folder, text):
    place = open_place(str(folder), folder, 0)
    transcode.transcode(Store(exact / "run" / "store"), place, Pair.parse(text))
    return place


@pytest.mark.parametrize("text", ["fp8:fp8", "int4:int8"])
def test_a_transcoded_store_is_the_one_that_extraction_writes(exact, tmp_path, text, capsys):
    coded(exact, tmp_path / "made", text)
    aux, last = text.split(":")
    more = ["target.dtype=bfloat16", f"store.aux_codec={aux}", f"store.last_codec={last}"]
    more += ["extract.gate_top1=0.5", "extract.gate_kl=1"]
    extract(tiny_config(exact, *more, f"store_dir={tmp_path / 'extracted'}"))
    made, extracted = contents(tmp_path / "made"), contents(tmp_path / "extracted")
    same = [name for name in extracted if name.endswith(".safetensors")] + ["plan.json", "provenance.json"]
    assert len(same) > 5
    for name in same:
        assert made[name] == extracted[name], name
    capsys.readouterr()
    extract(tiny_config(exact, *more, f"store_dir={tmp_path / 'made'}"))
    assert "up to date" in capsys.readouterr().out
    before = contents(tmp_path / "made")
    coded(exact, tmp_path / "made", text)  # nothing to do
    assert contents(tmp_path / "made") == before


def test_only_an_exact_store_is_transcoded(exact, tmp_path):
    place = coded(exact, tmp_path / "made", "fp8:fp8")
    with pytest.raises(UserError, match="not in bf16"):
        transcode.transcode(Store(place), open_place(str(tmp_path / "again"), tmp_path, 0), Pair("int8", "int8"))


def test_bytes_worked_out_are_bytes_written(exact, tmp_path):
    for text in ("bf16:bf16", "int8:int4"):
        pair = Pair.parse(text)
        store = Store(exact / "run" / "store") if pair == EXACT else Store(coded(exact, tmp_path / "made", text))
        wanted = transcode.bytes_per_token(pair, store.shape.hidden_size, 3, *transcode.shares(store))
        heads = 4096 * len(store.plan.shards) / store.plan.tokens
        assert 0 < store.manifest["bytes_per_token"] - wanted < heads
    assert transcode.bytes_per_token(Pair("bf16", "bf16"), 4096, 3) == 4 * 8192 + 9
    assert transcode.bytes_per_token(Pair("fp8", "fp8"), 4096, 3) / 1024 < 16.5


def test_what_is_exact_loses_nothing_and_less_bits_lose_more(exact, tmp_path):
    store = Store(exact / "run" / "store")
    same = transcode.fidelity(store, store)
    taught = [len(store.split("heldout").read(i).taught) for i in range(4)]
    assert same == {"positions": sum(taught), "top1": 1, "gate": 1, "kl": 0, "aux_error": 0, "last_error": 0}
    fine = transcode.fidelity(store, Store(coded(exact, tmp_path / "fine", "int8:int8")))
    coarse = transcode.fidelity(store, Store(coded(exact, tmp_path / "coarse", "int4:int4")))
    for name in ("kl", "aux_error", "last_error"):
        assert 0 < fine[name] < coarse[name] < 0.5
    mixed = transcode.fidelity(store, Store(coded(exact, tmp_path / "mixed", "int4:bf16")))
    assert (mixed["kl"], mixed["last_error"], mixed["aux_error"]) == (0, 0, coarse["aux_error"])


def run_of(tau, acceptance, prompts, waited=0.0):
    return {"tau": tau, "acceptance": acceptance, "prompts": prompts, "waited": waited}


def test_differences_are_to_the_same_seed():
    lost = {"top1": 1.0, "kl": 0.0, "aux_error": 0.0}
    base = {"1": run_of(2.0, 1.5, [[10, 5], [20, 10]]), "2": run_of(4.0, 1.5, [[10, 5], [20, 10]], waited=0.01)}
    half = {"1": run_of(1.8, 1.5, [[10, 5], [20, 10]]), "2": run_of(4.4, 1.2, [[10, 2], [20, 4]])}
    forced = {seed: {"tau": run["tau"]} for seed, run in base.items()}
    sizes = {"measured": 10.0, "wide": 1024.0}
    pairs = {
        "bf16:bf16": {"bytes": sizes, "fidelity": lost, "runs": base, "forced": forced},
        "fp8:fp8": {"bytes": sizes, "fidelity": lost, "runs": half, "forced": forced},
    }
    first, second = codecs.numbers({"pairs": pairs})
    assert first["tau_differences"] == [0, 0]
    assert second["tau_differences"] == pytest.approx([-0.1, 0.1])
    assert second["acceptance_differences"] == pytest.approx([0, -0.2])
    assert second["forced_differences"] == [0, 0]
    assert first["waited"] == 0.01
    assert codecs.between_seeds(base, "tau") == pytest.approx(0.5)
    text = codecs.table({"pairs": pairs})
    assert "+0.00% [-10.00%, +10.00%]" in text
    assert "mean over seeds 1, 2" in text


def test_the_error_over_prompts_is_that_of_paired_prompts():
    base = {"1": run_of(2.0, 1.5, [[10, 5], [30, 5], [20, 15]])}
    same = {"1": run_of(2.0, 1.5, [[10, 5], [30, 5], [20, 15]])}
    assert codecs.jackknife(same, base) == 0  # however much prompts differ, these do not
    other = {"1": run_of(2.0, 1.5, [[10, 9], [30, 5], [20, 12]])}
    assert codecs.jackknife(other, base) > 0.01
    assert codecs.jackknife({"1": run_of(2, 1, [[1, 1]])}, {"1": run_of(2, 1, [[1, 1]])}) is None
    assert codecs.between_seeds(base, "tau") is None
