#!/bin/bash
# Submit the three jobs from this folder, each after the one before.
set -euo pipefail
# shellcheck source=settings.sh
source settings.sh
data=$(sbatch --parsable data.sbatch)
store=$(sbatch --parsable --dependency=afterok:"$data" --array=0-$((PARTS - 1)) extract.sbatch)
sbatch --dependency=afterok:"$store" train.sbatch
