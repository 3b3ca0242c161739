#!/usr/bin/env bash
# The nano model from nothing, in order: tokenizer, autoencoder, joint pre-training, reflection fine-tuning, shipping.
#
#   bash scripts/nano.sh                               # everything, on one GPU (each stage under 9 minutes)
#   bash scripts/nano.sh --stages tokenizer,vae        # only these; what is done already is skipped
#   bash scripts/nano.sh --work DIR --python PYTHON    # another work folder; an interpreter that has the packages
#
# Ends with a complete checkpoint folder in WORK/bagel-nano-shapes and its evaluation beside it.
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

STAGES=tokenizer,vae,pretrain,reflect,ship,eval
WORK="$ROOT/outputs/nano"
OWN_PYTHON=
while [ $# -gt 0 ]; do
  case "$1" in
    --stages) STAGES="$2"; shift 2 ;;
    --work) WORK="$2"; shift 2 ;;
    --python) OWN_PYTHON="$2"; shift 2 ;;
    *) echo "error: unknown argument $1. Known: --stages, --work, --python." >&2; exit 2 ;;
  esac
done
if [ -n "$OWN_PYTHON" ]; then PYTHON="$OWN_PYTHON"; else setup; fi
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

wanted() { [[ ",$STAGES," == *",$1,"* ]] && [ ! -e "$WORK/$1.done" ]; }
finished() { touch "$WORK/$1.done"; echo "== $1: done in ${SECONDS} s"; SECONDS=0; }
mkdir -p "$WORK"
SECONDS=0
COMMON=(--tokenizer "$WORK/tokenizer" --vae "$WORK/vae" --data "$WORK/data")

if wanted tokenizer; then
  "$PYTHON" -m sft.tokenizer "$WORK/tokenizer"
  finished tokenizer
fi
if wanted vae; then
  "$PYTHON" -m sft.vae --output-dir "$WORK/vae" --seconds 60
  finished vae
fi
if wanted pretrain; then
  "$PYTHON" -m sft.pretrain --stage pretrain --output-dir "$WORK/pretrain" "${COMMON[@]}" ${PRETRAIN_ARGS:-}
  finished pretrain
fi
if wanted reflect; then
  "$PYTHON" -m sft.pretrain --stage reflect --init "$WORK/pretrain/checkpoint" \
    --output-dir "$WORK/reflect" "${COMMON[@]}" ${REFLECT_ARGS:-}
  finished reflect
fi
