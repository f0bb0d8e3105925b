"""What scripts/gpu_day.sh leaves behind where stages end well, fail, or run out of time. Its stages need a GPU."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import gpu_day

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "gpu_day.sh"
XML = """<testsuites><testsuite><testcase classname="a" name="x"/>
<testcase classname="a" name="y"><failure message="no"/></testcase>
<testcase classname="a" name="z"><skipped message="none"/></testcase></testsuite></testsuites>"""
STEP = {"case": "llama8b:2x4096:1", "variant": "fused", "seconds": 0.5, "mfu": 0.4, "memory": {"allocated": 1}}
MODEL = {"seconds": {"total": 0.25}, "utilisation": 0.5, "memory": 7}


def test_stages_are_told_as_they_ended_and_steps_beside_their_estimates(tmp_path, capsys):
    (tmp_path / "correct.xml").write_text(XML)
    (tmp_path / "correct.log").write_text("".join(f"line {i}\n" for i in range(50)))
    broken = {"case": "kimi:1x20480:0.35", "variant": "fused", "error": "out of memory"}
    faster = {**STEP, "seconds": 0.3, "variant": "fused+recompute", "uses": "fused kernels, attention by FA3"}
    (tmp_path / "steps_measured.json").write_text(json.dumps({"steps": [STEP, broken, faster]}))
    models = {"fused": MODEL, "fused+FA3+recompute": {**MODEL, "seconds": {"total": 0.2}}}
    cases = {f"llama8b:2x4096:1, {name}": model for name, model in models.items()}
    (tmp_path / "model.json").write_text(json.dumps({"cases": cases}))
    (tmp_path / "late.log").write_bytes(b"began\n\xff\n")
    for name, status, seconds in (("correct", 1, 12), ("late", 124, 540), ("steps", 0, 60)):
        assert gpu_day.main(["stage", str(tmp_path), name, str(status), str(seconds)]) == bool(status)
    assert gpu_day.main(["summary", str(tmp_path)]) == 0
    correct = json.loads((tmp_path / "correct.json").read_text())
    assert correct["tests"] == {"passed": 1, "failed": ["a::y"], "skipped": ["a::z"]}
    assert correct["log"] == [f"line {i}" for i in range(30, 50)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [one["timed_out"] for one in summary["stages"]] == [False, True, False]
    plain, failed, attended = summary["steps"]
    assert (plain["times_the_estimate"], failed["error"]) == (2, "out of memory")
    assert attended["times_the_estimate"] == pytest.approx(1.5), "of the model with the same attention"
    assert "correct      failed after 12 s, 1 passed, 1 failed, 1 skipped\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stages", "said"),
    [([], "false finds no CUDA device"), (["correct", "corect"], "there is no stage corect: choose from correct ")],
)
def test_without_a_gpu_or_a_known_stage_nothing_runs(stages, said, tmp_path):
    """Else the tests would all be skipped, and the stage done."""
    environment = {**os.environ, "PYTHON": "false", "REHEARSE": ""}
    done = subprocess.run([SCRIPT, tmp_path, *stages], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"gpu_day: {said}")
    assert list(tmp_path.iterdir()) == []


def test_the_test_files_that_it_names_are_there():
    named = re.findall(r"tests/gpu/\w+\.py", SCRIPT.read_text())
    assert named
    assert [name for name in named if not (SCRIPT.parent.parent / name).is_file()] == []
