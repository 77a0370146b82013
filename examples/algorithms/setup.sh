# Sourced by the training scripts: finds the checkout, asks for model and data, normalizes GSM8K into $PROMPTS.
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PYTHON="$ROOT/.venv/bin/python"
[ -x "$PYTHON" ] || PYTHON=python3

: "${MODEL_DIR:?directory of the Hugging Face model}"
: "${DATA_DIR:?directory of GSM8K, with train.jsonl or main/train-*.parquet}"
PROMPTS=$("$PYTHON" "$HERE/gsm8k.py" "$DATA_DIR" "${DATA_CACHE_DIR:-$ROOT/runs/gsm8k}")
