#!/usr/bin/env bash
# Make the environment in which the peers run beside us on a CPU: `benchmarks/install_peers.sh DIR` (about 2 minutes, 2.5 GB).
#
# Both peers pin things that a training step on a CPU does not need (sglang, another torch, torchvision), so: torch
# first, then what the two import, then the peers themselves without their requirements. Our own package is not
# installed there: it runs from the source tree.
set -euo pipefail
venv=${1:?usage: install_peers.sh DIR}
torch=torch==2.13.0
transformers=transformers==5.8.1 # the one that SpecForge pins
peers=(speculators==0.9.0 specforge==0.2.0)
# What `import speculators` and SpecForge's drafter need beyond those; triton only has to be importable.
imports=(datasets==5.2.0 loguru==0.7.3 openai==3.54.0 psutil==7.2.2 pydantic-settings==2.16.3 triton==3.9.0)
ours=(numpy==2.4.6 tqdm==4.70.1 matplotlib==3.11.2)

script=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")
stamp="$venv/.complete-$(sha256sum "$script" | cut -c1-12)" # any change of this list makes the environment anew
[ -e "$stamp" ] && exit 0

rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
echo "installing ${peers[*]} into $venv (about 2 minutes, 2.5 GB)"
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the peers need Python 3.11 or newer")'
pip install "$torch" "${ours[@]}"
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
"$venv/bin/python" -c "from importlib.metadata import version; print('torch==' + version('torch'))" > "$constraints"
pip install "$transformers" "${imports[@]}" --constraint "$constraints"
pip install --no-deps "${peers[@]}" hs-connectors==0.9.0
"$venv/bin/python" -c 'import speculators.models.eagle3, specforge.algorithms.eagle3.model' 2> "$venv/import.log" ||
    { cat "$venv/import.log"; exit 1; }
touch "$stamp"
