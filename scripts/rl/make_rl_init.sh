#!/usr/bin/env bash
# What RL starts from: one complete model folder out of an SFT checkpoint, which every command loads.
#
#   bash scripts/rl/make_rl_init.sh outputs/sft/checkpoint outputs/rl_init
#   bash scripts/rl/make_rl_init.sh outputs/lora/checkpoint outputs/rl_init --base ByteDance-Seed/BAGEL-7B-MoT
#   bash scripts/rl/make_rl_init.sh ckpts/0002969 outputs/rl_init --base ByteDance-Seed/BAGEL-7B-MoT
#
# The checkpoint is a model folder, an adapter (merged into --base), or a folder of the released
# trainer, which holds weights alone (model.safetensors; all the rest comes from --base). Files are
# hard links where the disk allows it, else copies: removing the checkpoint harms nothing.
# PYTHON_BIN: an interpreter that has the packages; otherwise .venv is made and used.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"

if [ $# -ne 2 ] && { [ $# -ne 4 ] || [ "${3:-}" != --base ]; }; then
  echo "usage: bash scripts/rl/make_rl_init.sh CHECKPOINT OUTPUT [--base MODEL]" >&2
  exit 2
fi
if [ -n "${PYTHON_BIN:-}" ]; then PYTHON="$PYTHON_BIN"; else setup; fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m umm_reflect.complete "$1" --output-dir "$2" ${4:+--base "$4"}
