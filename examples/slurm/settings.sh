# shellcheck shell=bash disable=SC1091
# Settings of all four jobs. Each job reads this file from the folder in which it was submitted.
export RECIPE=llama31_8b                # change: a recipe of configs/experiment, or the path of your own
export TARGET=meta-llama/Llama-3.1-8B-Instruct  # change: your target
export PROMPTS=/shared/prompts.jsonl    # change: prompts for the target to answer; self: it writes them
export RUN=/shared/runs/$RECIPE         # change: a folder on a disk that all machines share
export PARTS=16                         # change: how many machines extract
export CHECKOUT=/shared/eagle31          # change: a clone of this project
export VLLM=/shared/vllm/bin/vllm        # change: vLLM, in its own environment
source /shared/venv/bin/activate        # change: this project's environment, installed once on the shared disk
export OPTIONS="+experiment=$RECIPE run_dir=$RUN data.prompts=$PROMPTS"
