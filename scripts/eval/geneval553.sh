#!/usr/bin/env bash
# GenEval's 553 prompts: draw, reflect, judge, report, in one environment. From anywhere:
#
#   ARM=sft MODEL_DIR=pretrained/UMM-Reflection-BAGEL-SFT bash scripts/eval/geneval553.sh
#   ARM=rl  MODEL_DIR=pretrained/UMM-Reflection-BAGEL-RL  bash scripts/eval/geneval553.sh --raw-prompt
#   ARM=rl  MODEL_DIR=SFT_FOLDER CHECKPOINT=ADAPTER_OR_FOLDER bash scripts/eval/geneval553.sh
#
# Started again it goes on where it was; the results are in $OUTPUT_ROOT/$LABEL (summary.json).
#
# ARM                  base, sft or rl
# MODEL_DIR            the model: a folder or a hub id
# CHECKPOINT           what a training run wrote: a model folder in place of MODEL_DIR, or a LoRA
#                      adapter (adapter_config.json) on top of it. A sharded torch checkpoint
#                      (DCP, with a .metadata) has to be converted first
# NUM_GPUS             processes, one on each GPU; otherwise all GPUs
# OUTPUT_ROOT          outputs/geneval553
# LABEL                otherwise the arm, for rl with the model's name, and -rawprompt, -r0only
# REPAIR_RNG_STEP      names the edits' noise windows; otherwise 0, and 500 for rl
# GENERATE_EXTRA_ARGS  more flags, split at blanks; the same as flags after the script's name
# PROFILE              release (default: as published), ours or official
# PYTHON_BIN           an interpreter that has the packages; otherwise .venv is made and used
#
# --raw-prompt (GenEval's own words) and --r0-only (first images, no edits) are read here too; all
# other flags go to `umm-reflect eval` (--help lists them), for example --limit 6.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"

fail() { # WHAT REMEDY
  echo "error: $1. $2" >&2
  exit 2
}
case "${ARM:-}" in
  base | sft | rl) ;;
  *) fail "ARM is '${ARM:-}'" "Set ARM=base, ARM=sft or ARM=rl" ;;
esac
[ -n "${MODEL_DIR:-}" ] || fail "MODEL_DIR is not set" "Name the model's folder or hub id"
[[ "${NUM_GPUS:-0}" =~ ^[0-9]+$ ]] || fail "NUM_GPUS is '$NUM_GPUS'" "Give a whole number"
PROFILE="${PROFILE:-release}"

MODEL="$MODEL_DIR" NAME="$(basename "$MODEL_DIR")" ADAPTER=()
if [ -n "${CHECKPOINT:-}" ]; then
  NAME="$(basename "$CHECKPOINT")"
  if [ -f "$CHECKPOINT/adapter_config.json" ]; then
    ADAPTER=(--adapter "$CHECKPOINT")
  elif [ -f "$CHECKPOINT/ema.safetensors" ]; then
    MODEL="$CHECKPOINT"
  elif [ -f "$CHECKPOINT/.metadata" ]; then
    # its index is a pickle, which can run anything: it is not opened here
    fail "CHECKPOINT $CHECKPOINT is a sharded torch checkpoint (DCP), which is not read here" \
      "If you trust it, convert it where it was made (torch.distributed.checkpoint.format_utils.dcp_to_torch_save, then its model weights as ema.safetensors in a copy of MODEL_DIR) and name that folder"
  else
    fail "CHECKPOINT $CHECKPOINT holds neither ema.safetensors nor adapter_config.json" \
      "Name a folder that umm-reflect sft, rl or merge wrote"
  fi
fi

SUFFIX="" FLAGS=()
for word in ${GENERATE_EXTRA_ARGS:-} "$@"; do
  case "$word" in
    --raw-prompt) SUFFIX+="-rawprompt" FLAGS+=(--raw-prompt) ;;
    --r0-only) SUFFIX+="-r0only" FLAGS+=(--max-rounds 0) ;;
    *) FLAGS+=("$word") ;;
  esac
done
[ "$ARM" != rl ] || SUFFIX="-$NAME$SUFFIX"
OUTPUT="${OUTPUT_ROOT:-outputs/geneval553}/${LABEL:-$ARM$SUFFIX}"
if [ -n "${REPAIR_RNG_STEP:-}" ]; then FLAGS+=(--repair-rng-step "$REPAIR_RNG_STEP"); fi

if [ -n "${PYTHON_BIN:-}" ]; then PYTHON="$PYTHON_BIN"; else setup; fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
exec "$PYTHON" -m umm_reflect eval geneval553 --model "$MODEL" "${ADAPTER[@]}" --arm "$ARM" \
  --profile "$PROFILE" --gpus "${NUM_GPUS:-0}" --output-dir "$OUTPUT" --resume "${FLAGS[@]}"
