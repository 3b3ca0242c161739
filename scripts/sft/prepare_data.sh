#!/usr/bin/env bash
# The released training data, ready to train on: 29,529 trajectories and 1,265 anchors, about 100 GB
# (research use only, see its card), the controller's system prompt, and a check of every row.
#
#   bash scripts/sft/prepare_data.sh [DIR]                      # default: data/sft
#   bash scripts/sft/prepare_data.sh data/sft --revision COMMIT # --dry-run: only say what is fetched
#
# What follows DIR goes to `python -m sft.data_fetch`. Started again, it goes on where it stopped and
# keeps to the revision of the first time. HF_HOME, HF_ENDPOINT and HF_TOKEN are respected.
# PYTHON_BIN: an interpreter that has the packages; otherwise .venv is made and used.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"

DIR=data/sft
case "${1:-}" in "" | -*) ;; *) DIR="$1"; shift ;; esac
mkdir -p "$DIR"
DIR="$(cd "$DIR" && pwd)"
if [ -n "${PYTHON_BIN:-}" ]; then PYTHON="$PYTHON_BIN"; else setup train; fi
cd "$ROOT"

"$PYTHON" -m sft.data_fetch "$DIR" "$@"
case " $* " in *" --dry-run "*) exit 0 ;; esac
"$PYTHON" -m umm_reflect download prompt --output-dir "$DIR"
"$PYTHON" -m umm_reflect data check "$DIR" --expect release --report "$DIR/violations.jsonl"

echo "ready. Train with: bash scripts/sft/train_sft.sh --data $DIR --preset release \\"
echo "  --model ByteDance-Seed/BAGEL-7B-MoT --system-prompt $DIR/controller_system_prompt.txt"
