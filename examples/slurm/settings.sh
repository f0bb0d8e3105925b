# shellcheck shell=bash disable=SC1091
# What the four jobs share; each reads it from the folder that it is submitted from.
export RECIPE=llama31_8b                # change: a recipe of configs/experiment, or the path of your own
export TARGET=meta-llama/Llama-3.1-8B-Instruct  # change: what the recipe trains a drafter for
export PROMPTS=/shared/prompts.jsonl    # change: what it answers; `self` has it write them
export RUN=/shared/runs/$RECIPE         # change: a folder that every machine sees
export PARTS=16                         # change: machines that extract
export CHECKOUT=/shared/eagle31          # change: a clone of this project
export VLLM=/shared/vllm/bin/vllm        # change: vLLM, in an environment of its own
source /shared/venv/bin/activate        # change: this project's, installed once on the shared disk
export OPTIONS="+experiment=$RECIPE run_dir=$RUN data.prompts=$PROMPTS"
