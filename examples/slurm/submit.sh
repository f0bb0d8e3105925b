#!/bin/bash
# Submit the four jobs from this folder; each waits for the one before.
set -euo pipefail
# shellcheck source=settings.sh
source settings.sh
data=$(sbatch --parsable data.sbatch)
store=$(sbatch --parsable --dependency=afterok:"$data" --array=0-$((PARTS - 1)) extract.sbatch)
train=$(sbatch --parsable --dependency=afterok:"$store" train.sbatch)
sbatch --dependency=afterok:"$train" finish.sbatch
