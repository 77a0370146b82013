#!/usr/bin/env bash
# PPO on GSM8K with Qwen3-4B on eight GPUs: two train the policy, two the critic, four sample. Takes 16 GB of /dev/shm.
#
#     MODEL_DIR=models/Qwen3-4B DATA_DIR=data/gsm8k examples/algorithms/ppo_qwen3_4b.sh
#
# Options of relax-launch may follow, e.g. --dry-run, --num-rollout 500, --save-interval 20, --resume after a crash.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

exec "$ROOT/bin/relax-launch" "$HERE/ppo_qwen3_4b.yaml" --hf-checkpoint "$MODEL_DIR" --prompt-data "$PROMPTS" "$@"
