#!/usr/bin/env bash
# RLOO on GSM8K with Qwen3-0.6B, in lockstep, on two GPUs.
#
#     MODEL_DIR=models/Qwen3-0.6B DATA_DIR=data/gsm8k examples/algorithms/rloo_qwen3_0.6b_gsm8k.sh
#     ... ADVANTAGE_ESTIMATOR=grpo ...   the control arm: the same batches, lengths and learning rate
#
# Options of relax-launch may follow, e.g. --dry-run.
set -euo pipefail
DATA_CACHE_DIR=${RLOO_DATA_CACHE_DIR:-}
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

ROLLOUT_BATCH_SIZE=${ROLLOUT_BATCH_SIZE:-32}
N_SAMPLES=${N_SAMPLES:-8}
ADVANTAGE_ESTIMATOR=${ADVANTAGE_ESTIMATOR:-rloo}

exec "$ROOT/bin/relax-launch" "$HERE/rloo_qwen3_0.6b_gsm8k.yaml" \
  --run-name "gsm8k-$ADVANTAGE_ESTIMATOR" \
  --hf-checkpoint "$MODEL_DIR" \
  --prompt-data "$PROMPTS" \
  --advantage-estimator "$ADVANTAGE_ESTIMATOR" \
  --num-rollout "${NUM_ROLLOUT:-200}" \
  --rollout-batch-size "$ROLLOUT_BATCH_SIZE" \
  --n-samples-per-prompt "$N_SAMPLES" \
  --global-batch-size "${GLOBAL_BATCH_SIZE:-$((ROLLOUT_BATCH_SIZE * N_SAMPLES))}" \
  "$@"
