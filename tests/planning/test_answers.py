"""What the target's answers take, beside numbers that were worked out by hand."""

import gzip
import json
from fractions import Fraction

import pyarrow
import pyarrow.parquet
import pytest
from published_targets import FOLDER

from data_prep.sources import quotas
from eagle31_train import compose
from eagle31_train.planning import inputs, sections
from eagle31_train.planning.planned import reckon

QWEN = ["name=x", f"target.path={FOLDER / 'qwen3_8b'}", "run_dir=/nowhere/at/all"]


def planned(*words):
    return reckon(compose.load_config([*QWEN, *words], resolve=False))[0]


def section(*words):
    return "\n".join(sections.answering(planned(*words)))


SIZE = "plan.target_parameters=70e9"


@pytest.mark.parametrize(
    ("words", "sizes"),
    [  # GiB a device for answers, extraction and evaluation, which decodes in float32
        ([SIZE], ["133.1", "130.4", "260.8"]),
        ([SIZE, "target.device_map=auto"], ["16.6", "16.3", "32.6"]),
        ([SIZE, "target.dtype=float32", "evaluate.dtype=bfloat16"], ["263.5", "260.8", "130.4"]),
        ([SIZE, "data.generate.server=http://x/v1", "evaluate.backend=vllm"], ["130.4"]),
        ([SIZE, "extract.engine=vllm", "+extract.engine_args={tensor_parallel_size: 2}"], ["133.1", "65.2", "260.8"]),
    ],
)
def test_where_the_targets_weights_do_not_fit(words, sizes):
    """With answers 32 × (300 + 300) tokens of keys and values, 147,456 bytes each: 2.64 GiB."""
    lines = sections.target(planned("data.prompts=self", "regenerate=true", *words))[2:]
    assert [line.split()[1] for line in lines] == sizes
    assert ["TOO MUCH for 80 GiB: " in line for line in lines] == [float(size) > 72 for size in sizes]


def test_prompts_that_the_target_writes_and_answers_by_hand():
    """2,000 prompts of 256 tokens, a quarter refused, and answers of 300; 36 layers of 8 keys and values of 128."""
    what = planned("plan.target_parameters=8e9").answering(2000, 300, 300)
    assert what.written == pytest.approx(682_666.7)
    assert what.answers == 600_000
    assert (what.batch, what.devices) == (32, 1)
    assert what.weights == 16e9
    assert what.cache == 32 * 450 * 2 * 73_728 == 2_123_366_400
    assert what.step == pytest.approx(5.41e-3, rel=1e-3)  # 18.12 GB at 3,350 GB/s; its FLOPs want 0.53 ms
    assert what.seconds == pytest.approx(216.9 + 9.7, rel=1e-3)  # 40,083 steps, and 600,000 tokens read
    assert what.flops == pytest.approx(1_282_666.7 * (16e9 + 265_420_800) + 9.6e15, rel=1e-6)
    slow = planned("plan.target_parameters=8e9", "plan.peak_tflops=10").answering(2000, 300, 300)
    assert slow.step == pytest.approx(32 * 16.265e9 / 1e13, rel=1e-3)
    several = ["data.generate.samples=2", "data.generate.temperature=1"]  # half of the prompts, each read twice
    what = planned("plan.target_parameters=8e9", *several).answering(2000, 300, 300)
    assert what.flops == pytest.approx(941_333.3 * (16e9 + 265_420_800) + 9.6e15, rel=1e-6)


def test_a_server_has_all_devices_and_later_turns_are_answered_twice():
    words = ("data.generate.server=http://x/v1", "data.generate.concurrency=100", "plan.devices=4")
    what = planned(*words, "data.self_prompts.turns=2").answering(2000, 300, 300)
    assert (what.batch, what.devices) == (100, 4)
    # Two turns of 150 tokens, and between them half of the answers.
    assert what.written == pytest.approx(2000 * (300 / 0.75 + 150))


def test_of_experts_those_are_read_that_some_answer_is_sent_to():
    read = {}
    for batch in (1, 2):
        plan = planned(f"target.path={FOLDER / 'gpt_oss_20b'}", f"data.generate.batch_size={batch}")
        read[batch] = plan.answering(10, 300, 300).weights
    sizes, value = plan.target.sizes, plan.target.weight_bytes
    assert sizes.chosen == 4 / 32
    assert sizes.multiplied == pytest.approx(sizes.dense + sizes.experts / 8)
    assert sizes.embedding == 201_088 * 2_880, "of which a step reads a row for each answer"
    assert read[1] == pytest.approx(value * sizes.multiplied)
    assert read[2] == pytest.approx(value * (sizes.dense + sizes.experts * (1 - 49 / 64)))


def test_latent_attention_keeps_its_latent_and_one_rotated_key():
    plan = planned(f"target.path={FOLDER / 'kimi_k2'}", "plan.target_parameters=32e9")
    assert plan.cache_bytes == 2 * 61 * (512 + 64)


def test_mxfp4_is_planned_unpacked_where_transformers_would_unpack_it(tmp_path, monkeypatch):
    raw = json.loads((FOLDER / "gpt_oss_20b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "mxfp4"}}))
    target = f"target.path={tmp_path}"
    for package, loaded in ((None, 2.0), (object(), 0.5)):
        monkeypatch.setattr(inputs, "find_spec", lambda name, package=package: package)
        sizes = planned(target).target
        assert (sizes.weight_bytes, sizes.loaded_bytes) == (0.5, loaded)
        text = "\n".join(sections.target(planned(target, "regenerate=true")))
        shown = {line.split()[0]: line.split()[1] for line in text.splitlines()}
        assert (shown.get("unpacked"), shown["answers"]) == (("2", "39.9") if loaded == 2.0 else (None, "10.6"))
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    here, there = (
        planned(target, *words).answering(10, 300, 300).weights
        for words in ([], ["data.generate.server=http://x/v1", "data.generate.concurrency=32"])
    )
    assert here == 4 * there, "a server reads them packed"
    assert planned(target, "target.dtype=float32").target.loaded_bytes == 4.0
    served = planned(target, "regenerate=true", "data.generate.server=http://x/v1", "extract.engine=vllm")
    assert [line.split()[1] for line in sections.target(served) if "extraction" in line] == ["9.7"]


def test_prompts_at_hand_are_counted_and_those_that_are_wanted_are_said(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(300)))
    given = ["regenerate=true", f"data.prompts={prompts}", "data.generate.samples=2"]
    plan = planned(*given)
    assert plan.data.work.conversations * (1 + plan.data.heldout) == pytest.approx(600)
    shown = section(*given)
    assert "prompts                          300   2 × 300 tokens of answer to each" in shown
    assert "NOT ENOUGH" not in shown
    assert "LONG ANSWERS" not in shown
    thinking = "data.generate.max_new_tokens=4096"
    longer = "LONG ANSWERS   an answer may have 4,096 tokens: if yours are longer, raise plan.sample_tokens"
    assert longer in section(*given, thinking)
    assert "Set plan.tokens=3e8 to see under `prompts` how many" in shown
    # 60 million tokens of 600 each, and 5.3 % more to hold out, from two answers to a prompt.
    wanted = section(*given, "plan.tokens=6e7")
    assert "prompts                       52,632" in wanted
    assert "NOT ENOUGH   there are only 300 prompts: add more, or raise data.generate.samples" in wanted
    own = section("plan.tokens=6e7")
    assert "NOT ENOUGH   there are only 2,000 prompts: add more, or raise data.self_prompts.count" in own
    assert "none: the conversations" in section(f"data.conversations={prompts}")
    # Of a data set on the hub nobody knows without a download.
    assert "NOT ENOUGH" not in section("regenerate=true", "data.prompts=org/name", "plan.tokens=6e7")


def test_rows_are_counted_as_stage_1_reads_them(tmp_path):
    (tmp_path / "inner").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["one", "two"]}), tmp_path / "inner" / "a.parquet")
    (tmp_path / "b.csv").write_text('prompt\n"one, of\ntwo lines"\ntwo\n\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "one"}\n\n{"prompt": "two"}'))
    (tmp_path / "d.json").write_text('[{"prompt": "one"}, {"prompt": "two"}]')
    (tmp_path / "_notes").write_text("none of it")
    config = compose.load_config([*QWEN, f"data.conversations={tmp_path}"])
    assert inputs.prompts_at_hand(config) == 8
    (tmp_path / "d.json").write_text("no JSON")
    assert inputs.prompts_at_hand(config) is None


def test_of_a_mixture_as_many_as_its_weights_allow_are_at_hand(tmp_path):
    for name, count in {"a": 420, "b": 24}.items():
        (tmp_path / name).write_text('{"prompt": "?"}\n' * count)

    def at_hand(weight, *words):
        sources = [f"data.sources.{name}.path={tmp_path / name}" for name in "ab"]
        return inputs.prompts_at_hand(compose.load_config([*QWEN, *sources, f"data.sources.a.weight={weight}", *words]))

    assert at_hand(3) == 3 * 24 + 24
    weights, rows = {"a": Fraction("0.3"), "b": Fraction(1)}, {"a": 420, "b": 24}
    assert at_hand(0.3) == 31 == sum(quotas(weights, rows, None).values())
    assert at_hand(3, "data.rows=8") == 8
    assert at_hand("much") is None  # which stage 1 refuses
