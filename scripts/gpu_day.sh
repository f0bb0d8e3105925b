#!/usr/bin/env bash
# What to run first if you have a GPU for an hour or less: stages of under ten minutes, the most important first. Each
# writes OUT/STAGE.log and OUT/STAGE.json, whether it succeeds or fails. summary.json has them all, beside the estimates
# of `make bench-gpu-model` if OUT/model.json exists (it needs a torch without CUDA: copy it from another machine).
# Nothing here needs the network.
#
#   scripts/gpu_day.sh OUT                    all stages
#   scripts/gpu_day.sh OUT steps kimi_step    some stages
#
# PYTHON: an environment with the project's dependencies and a torch built for CUDA (default .venv/bin/python).
# SECONDS_EACH: the time limit of a stage (default 540). REHEARSE=1: the same on a CPU, at tiny sizes.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ]; then
    echo "usage: scripts/gpu_day.sh OUT [STAGE ...]" >&2
    exit 2
fi
mkdir -p "$1" && OUT=$(cd "$1" && pwd) && shift || exit 2
PYTHON=${PYTHON:-.venv/bin/python}
SECONDS_EACH=${SECONDS_EACH:-540}
REHEARSE=${REHEARSE:-}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 WANDB_MODE=offline

LATER="tests/gpu/test_memory.py tests/gpu/test_profiles.py"
STAGES=(correct memory steps kimi_toy kimi_step longest)
BENCH="-m benchmarks.gpu --repeats 3"
KIMI="+experiment=kimi_toy run_dir=$OUT/kimi_toy target.path=$OUT/kimi_target train.wandb=disabled"
PROFILE=gpu
CASES="llama8b:2x4096:1 llama8b:2x4096:0.35"
FULL=kimi:1x20480:0.35 FULL_AS="fused+recompute"
if [ -n "$REHEARSE" ]; then
    BENCH="-m benchmarks.gpu --repeats 1 --device cpu --quick"
    KIMI="$KIMI data.rows=24 data.generate.max_new_tokens=16 data.generate.samples=1"
    KIMI="$KIMI train.max_steps=2 evaluate.num_prompts=2 evaluate.max_new_tokens=8"
    PROFILE=cpu
    CASES="tiny:2x64:1"
    FULL=tiny-mla:1x64:0.35 FULL_AS="plain+recompute"
fi

toy() {
    "$PYTHON" -m eagle31_train.targets.toy --out "$OUT/kimi_target" &&
        "$PYTHON" -m eagle31_train data $KIMI &&
        "$PYTHON" -m eagle31_train extract $KIMI &&
        "$PYTHON" -m accelerate.commands.launch --config_file configs/accelerate/$PROFILE.yaml train.py $KIMI &&
        "$PYTHON" -m eagle31_train evaluate $KIMI &&
        "$PYTHON" -m eagle31_train export $KIMI
}

tests() { # a stage's name, and words for pytest
    local name=$1
    shift
    "$PYTHON" -m pytest -m gpu -rs -p no:cacheprovider --junitxml "$OUT/$name.xml" "$@"
}

run() { # one stage
    case $1 in
        correct) tests correct tests/gpu ${LATER//tests/--ignore=tests} ;;
        memory) tests memory $LATER ;;
        steps) "$PYTHON" $BENCH --out "$OUT/steps_measured" --cases $CASES --longest ;;
        kimi_toy) toy ;;
        kimi_step) "$PYTHON" $BENCH --out "$OUT/kimi_step_measured" --cases $FULL --longest --variants $FULL_AS ;;
        longest) "$PYTHON" $BENCH --out "$OUT/longest_measured" --cases ;;
    esac
}

for stage in "${@:-${STAGES[@]}}"; do
    if [[ " ${STAGES[*]} " != *" $stage "* ]]; then
        echo "gpu_day: there is no stage $stage: choose from ${STAGES[*]}" >&2
        exit 2
    fi
done
if [ -z "$REHEARSE" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_day: $PYTHON finds no CUDA device: set PYTHON to a python with a torch built for CUDA, or REHEARSE=1" >&2
    exit 2
fi
export -f run tests toy
export OUT PYTHON BENCH KIMI PROFILE LATER CASES FULL FULL_AS
failed=0
for stage in "${@:-${STAGES[@]}}"; do
    echo "gpu_day: $stage ($(date -u +%H:%M:%S))"
    SECONDS=0
    rm -f "$OUT/$stage".{xml,json} "$OUT/${stage}_measured.json"  # results of an earlier day
    timeout --kill-after 10 "$SECONDS_EACH" bash -c "run $stage" >"$OUT/$stage.log" 2>&1
    status=$?
    "$PYTHON" -m benchmarks.gpu_day stage "$OUT" "$stage" "$status" "$SECONDS" || failed=1
done
"$PYTHON" -m benchmarks.gpu_day summary "$OUT" || failed=1
exit $failed
