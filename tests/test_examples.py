"""The examples for schedulers: scripts by shellcheck, JobSets by their schema, commands as their programs take them."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from test_docs import check

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted([*EXAMPLES.rglob("*.sbatch"), *EXAMPLES.rglob("*.sh")])
PROGRAM = re.compile(r"\b(?:eagle31|accelerate launch)\b.*?(?=$|'| && | \|\| )")


def scripts_in(value):
    """All texts of a YAML document that a shell runs."""
    if isinstance(value, dict):
        return [text for entry in value.values() for text in scripts_in(entry)]
    if isinstance(value, list):
        return [text for entry in value for text in scripts_in(entry)]
    return [value] if isinstance(value, str) else []


def command_lines(text):
    """What a script asks of our programs, with the variables that its settings hold."""
    text = re.sub(r"^\s*#.*\n", "", text.replace("\\\n", " "), flags=re.M)
    text = text.replace("python -m eagle31_train.launcher", "accelerate launch")  # which takes the same
    values = {"OPTIONS": "+experiment=llama31_8b run_dir=x", "TARGET": "HUB-ID", "NAME": "x"}
    for name, value in values.items():
        text = re.sub(rf"\$\{{?{name}\}}?", value, text)
    return [line for line in PROGRAM.findall(re.sub(r"[ \t]+", " ", text)) if "eagle31_train" in line or "=" in line]


def shellcheck(*scripts):
    """What shellcheck finds in scripts, with the files that they source."""
    program = Path(sys.executable).parent / "shellcheck"
    return subprocess.run([program, "-x", "-P", "SCRIPTDIR", *scripts], capture_output=True, text=True, check=False)


def test_shellcheck_finds_nothing_in_the_scripts(tmp_path):
    done = shellcheck(*SCRIPTS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (tmp_path / "unquoted.sh").write_text("#!/bin/bash\nls $1\n")
    assert "SC2086" in shellcheck(tmp_path / "unquoted.sh").stdout


@pytest.mark.parametrize(
    ("status", "finished", "asked"),
    [(75, 0, "scontrol requeue 7"), (137, 0, "scontrol requeue 7"), (2, 0, ""), (0, 1, "")],
)
def test_a_job_is_queued_again_after_a_stop_or_an_accident_and_not_after_a_mistake(tmp_path, status, finished, asked):
    """srun ends with the training's status; what else the script starts says so."""
    for script in (EXAMPLES / "slurm").iterdir():
        (tmp_path / script.name).write_text(script.read_text().replace("/shared", str(tmp_path)))
    run = tmp_path / "runs" / "llama31_8b" / "train"
    for folder in (tmp_path / "eagle31", tmp_path / "venv" / "bin", run):
        folder.mkdir(parents=True)
    stubs = {"srun": f"exit {status}", "scontrol": 'echo "scontrol $*"', "activate": ""}
    for name, body in stubs.items():
        (tmp_path / "venv" / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "venv" / "bin" / name).chmod(0o755)
    if finished:
        (run / "manifest.json").touch()
    variables = {"PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}
    variables["SLURM_CPUS_PER_TASK"] = "64"
    done = subprocess.run(
        ["bash", "train.sbatch"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.startswith(asked), done.stdout
    assert (done.returncode, bool(done.stdout)) == ((0, True) if asked else (status, False))


def fits(manifest):
    """Whether a manifest is a JobSet, down to its containers, without a field that Kubernetes does not know."""
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet as JobSet  # a second

    try:
        return JobSet.from_dict(manifest).to_dict() == manifest
    except ValidationError:
        return False


@pytest.mark.parametrize("path", sorted((EXAMPLES / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_a_manifest_is_a_jobset(path):
    good = yaml.safe_load(path.read_text())
    assert good["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert fits(good)
    for change in ({"completions": "2"}, {"paralelism": 2}, {"template": {"spec": {}}}, {"template": None}):
        bad = copy.deepcopy(good)
        bad["spec"]["replicatedJobs"][0]["template"]["spec"].update(change)
        assert not fits(bad), change


def test_commands_of_the_examples_are_taken_by_their_programs():
    texts = [path.read_text() for path in SCRIPTS]
    for path in EXAMPLES.rglob("*.yaml"):
        texts += [text for document in yaml.safe_load_all(path.read_text()) for text in scripts_in(document)]
    lines = [line for text in texts for line in command_lines(text)]
    assert len(lines) >= 6, lines
    for line in lines:
        check(line)
