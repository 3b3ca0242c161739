#!/usr/bin/env bash
# The nano model from nothing, in order: tokenizer, autoencoder, joint pre-training, reflection fine-tuning,
# its own first images with a judge's reading, looking at those, evaluation.
#
#   bash scripts/nano.sh                               # everything, on one GPU (each stage under 9 minutes)
#   bash scripts/nano.sh --stages tokenizer,vae        # only these; what is done already is skipped
#   bash scripts/nano.sh --work DIR --python PYTHON    # another work folder; an interpreter that has the packages
#
# Ends with a complete checkpoint folder in WORK/refine/checkpoint and its evaluation in WORK/eval.
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

STAGES=tokenizer,vae,pretrain,reflect,collect,refine,eval
WORK="$ROOT/outputs/nano"
OWN_PYTHON=
REFINE_SECONDS=230
while [ $# -gt 0 ]; do
  case "$1" in
    --stages) STAGES="$2"; shift 2 ;;
    --work) WORK="$2"; shift 2 ;;
    --refine-seconds) REFINE_SECONDS="$2"; shift 2 ;;
    --python) OWN_PYTHON="$2"; shift 2 ;;
    *) echo "error: unknown argument $1. Known: --stages, --work, --python, --refine-seconds." >&2; exit 2 ;;
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
  "$PYTHON" -m sft.pretrain --output-dir "$WORK/pretrain" "${COMMON[@]}" \
    --seconds 215 --decay 0.2 --compile
  finished pretrain
fi
if wanted reflect; then
  "$PYTHON" -m sft.pretrain --init "$WORK/pretrain/checkpoint" \
    --output-dir "$WORK/reflect" "${COMMON[@]}" --seconds 130 --decay 0.8 --compile \
    --muon-lr 0.012 --adamw-lr 1.2e-3 --draw-rows 144 --look-rows 36
  finished reflect
fi
if wanted collect; then
  "$PYTHON" -m eval.collect --model "$WORK/reflect/checkpoint" --output-dir "$WORK/own" --count 16384
  finished collect
fi
if wanted refine; then
  "$PYTHON" -m sft.pretrain --init "$WORK/reflect/checkpoint" --collected "$WORK/own" \
    --output-dir "$WORK/refine" "${COMMON[@]}" --seconds "$REFINE_SECONDS" --decay 0.6 --compile --ema 0.999 \
    --muon-lr 0.015 --adamw-lr 1.5e-3 --draw-rows 224 --look-rows 16 --own-rows 8 --seed 1
  finished refine
fi
if wanted eval; then
  "$PYTHON" -m eval.run shapes553 compound hard --model "$WORK/refine/checkpoint" --seeds 0,1,2 \
    --edit-view both --batch-size 512 --output-dir "$WORK/eval" --overwrite
  finished eval
fi
