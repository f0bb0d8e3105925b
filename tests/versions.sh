#!/usr/bin/env bash
# The tests that guard exactness, with the lowest or the highest versions that pyproject.toml allows:
#
#     tests/versions.sh lowest python3.10 DIR
#     tests/versions.sh highest python3.13 DIR
#
# DIR is made anew (8 GB: PyPI's torch brings CUDA's libraries). What ran is in docs/dependencies.md.
set -euo pipefail
cd "$(dirname "$0")/.."
which=${1:?usage: versions.sh lowest|highest PYTHON DIR}
python=${2:?} venv=${3:?}

rm -rf "$venv" "$venv-uv"
"$python" -m venv "$venv-uv"
"$venv-uv/bin/pip" install -q uv
uv() { "$venv-uv/bin/uv" --quiet "$@"; }
uv venv --python "$python" "$venv"
resolution=highest
if [ "$which" = lowest ]; then
    resolution=lowest-direct
fi
DS_BUILD_OPS=0 uv pip install --python "$venv/bin/python" --resolution "$resolution" --editable '.[dev]'
uv pip freeze --python "$venv/bin/python" > "$venv/versions.txt"
grep -i -E '^(torch|transformers|accelerate|deepspeed|datasets|numpy)==' "$venv/versions.txt"
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
pytest=("$venv/bin/python" -m pytest --numprocesses auto --maxprocesses 2 --dist loadfile)
"${pytest[@]}" -m core
"${pytest[@]}" -m 'not core and not slow and not gpu and not vllm' tests/model tests/store tests/train/test_{guards,profiles}.py
