#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-4B on eight GPUs: four train, four sample, one batch ahead. Takes 16 GB of /dev/shm.
#
#     MODEL_DIR=models/Qwen3-4B DATA_DIR=data/gsm8k examples/algorithms/grpo_qwen3_4b.sh
#
# Options of relax-launch may follow, e.g. --dry-run, --num-rollout 500, --save-interval 20, --resume after a crash.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

exec "$ROOT/bin/relax-launch" "$HERE/grpo_qwen3_4b.yaml" --hf-checkpoint "$MODEL_DIR" --prompt-data "$PROMPTS" "$@"
