"""The wheel alone, in an environment without the checkout, from an empty folder: what `pip install` gives a user."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["data.generate.samples=1", "data.generate.max_new_tokens=24", "data.rows=48", "train.epochs=1"]
SMALL += ["target.dtype=float32", "train.precision=no"]  # a CPU without bf16 is ten times slower in it
SMALL += ["train.max_steps=8", "evaluate.num_prompts=4", "evaluate.max_new_tokens=16", "train.wandb=disabled"]
SOURCES = {"pyproject.toml", "README.md", "LICENSE", "configs", "data_prep", "eagle31_train", "train"}
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}


def installed(folder):
    """bin/ of an environment with the wheel and, from this one, what it needs."""
    source = folder / "source"  # what an earlier build left in build/ would come into the wheel
    shutil.copytree(
        ROOT, source, ignore=lambda at, names: set(names) - SOURCES if Path(at) == ROOT else {"__pycache__"}
    )
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", source, "-w", folder], check=True, env=ENVIRONMENT)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "env" / "lib" / version / "site-packages"
    wheel = next(folder.glob("*.whl"))
    python = str(folder / "env" / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", "-q", "--no-deps", wheel], check=True, env=ENVIRONMENT)
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    top = {path.name for path in packages.iterdir() if not path.name.startswith(("eagle31-", "__pycache__"))}
    assert top == {"eagle31_train", "dependencies.pth"}
    return folder / "env" / "bin"


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a dozen processes start in turn
def test_a_target_is_planned_and_trained_from_an_empty_folder(tmp_path):
    """Whose name has a space and other letters than ASCII."""
    binaries, empty = installed(tmp_path), tmp_path / "ein Ördner"
    empty.mkdir()
    for name in ("train", "data_prep"):  # of the user's own
        (empty / f"{name}.py").write_text("raise SystemExit('the user's own file was run')")

    def eagle31(*words, program="eagle31"):
        how = {"cwd": empty, "env": ENVIRONMENT, "text": True, "capture_output": True, "check": False}
        done = subprocess.run([str(binaries / program), *words], **how)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    assert "eagle31 run" in eagle31("--help")
    planned = eagle31("plan", f"target.path={ROOT / 'tests' / 'published' / 'qwen3_8b'}")
    assert "intermediate_size        12288" in planned
    eagle31("-m", "eagle31_train.targets.toy", program="python")
    assert (empty / "models" / "kimi-toy" / "config.json").is_file()
    shown = eagle31("run", "+experiment=kimi_toy", *SMALL)
    export = empty / "runs" / "kimi_toy" / "export"
    assert (export / "config.json").is_file()
    assert "acceptance length" in shown
    assert "serve it with" in shown
    assert eagle31("run", "+experiment=kimi_toy", *SMALL).count("up to date") >= 4
    assert not (empty / "mine.yaml").exists()
    module = eagle31("-m", "eagle31_train", "train", "--help", program="python")  # with this folder on the path
    assert "Stage 3" in module
    eagle31("new", "mine")
    assert "trained" in eagle31("plan", "+experiment=mine.yaml", "target.path=models/kimi-toy")
