#!/usr/bin/env bash
# The nano model from nothing, in order, on one GPU (each stage under 9 minutes):
#
#   tokenizer, vae     the parts that stay as they are
#   pretrain, reflect  describe, draw, edit; then trajectories
#   collect, grow      its own first images with a judge's reading, and all of it again with those
#   gather, sft        its own trajectories, distorted shapes and drawn ones; then the SFT trainer
#   gather-again, sft-again    the same from there, with more of them
#   gather-finer, sft-finer    once more, seen in finer detail: 168 pixels for the ViT, more looks
#   eval               the test sets, three seeds, both edit views
#   careless           not among the others: sft-again's model after 50 steps on trajectories of someone who
#                      overlooks a third of the mistakes (a CPU does). RL has room from there
#                      (scripts/rl/nano.sh --model WORK/careless/checkpoint)
#
#   bash scripts/nano.sh                               # everything
#   bash scripts/nano.sh --stages tokenizer,vae        # only these; what is done already is skipped
#   bash scripts/nano.sh --work DIR --python PYTHON    # another work folder; an interpreter that has the packages
#
# Ends with a complete checkpoint folder in WORK/finer/checkpoint and its evaluation in WORK/eval.
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

STAGES=tokenizer,vae,pretrain,reflect,collect,grow,gather,sft,gather-again,sft-again,gather-finer,sft-finer,eval
WORK="$ROOT/outputs/nano"
OWN_PYTHON=
GROW_SECONDS=380
SFT_SECONDS=340
while [ $# -gt 0 ]; do
  case "$1" in
    --stages) STAGES="$2"; shift 2 ;;
    --work) WORK="$2"; shift 2 ;;
    --grow-seconds) GROW_SECONDS="$2"; shift 2 ;;
    --sft-seconds) SFT_SECONDS="$2"; shift 2 ;;
    --python) OWN_PYTHON="$2"; shift 2 ;;
    *) echo "error: unknown argument $1. Known: --stages, --work, --python, --grow-seconds, --sft-seconds." >&2; exit 2 ;;
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
# together FOLDER CHECKPOINT COUNT [MORE]: three collectors side by side, since one does not fill a GPU
together() {
  local folder="$1" checkpoint="$2" count="$3" pids=() pid
  shift 3
  for part in 0 1 2; do
    "$PYTHON" -m eval.collect --model "$checkpoint" --output-dir "$WORK/$folder$part" --count "$count" \
      --batch-size 1024 --seed "$((count + part))" --workers 3 "$@" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
}

if wanted collect; then
  together own "$WORK/reflect/checkpoint" 12288
  finished collect
fi
if wanted grow; then
  "$PYTHON" -m sft.pretrain --init "$WORK/reflect/checkpoint" --collected "$WORK"/own{0,1,2} \
    --output-dir "$WORK/grow" "${COMMON[@]}" --first-shard 1000 --draw-shards 80 --seconds "$GROW_SECONDS" \
    --decay 0.6 --compile --ema 0.999 --muon-lr 0.016 --adamw-lr 1.6e-3 \
    --draw-rows 192 --kept-rows 32 --look-rows 12 --own-rows 8 --seed 2
  finished grow
fi
# gathered FOLDER CHECKPOINT COUNT DISTORTED VARIANTS: what the checkpoint is to learn from next
gathered() {
  local to="$1" drawn distorted
  mkdir -p "$to"
  "$PYTHON" -m sft.shapes_trajectories "$to/trajectories" --trajectories 20000 --drawings 40000 \
    --seed "$3" --workers 4 &
  drawn=$!
  "$PYTHON" -m eval.distort --count "$4" --output-dir "$to/distorted" --seed "$3" --workers 8 &
  distorted=$!
  together "${to#"$WORK/"}/looked" "$2" "$3" --rounds 2
  wait "$drawn"
  wait "$distorted"
  "$PYTHON" -m sft.shapes_trajectories "$to/trajectories" --trajectories 0 --variants "$5" \
    --collected "$to"/looked{0,1,2} "$to/distorted"
}
# trained FOLDER DATA CHECKPOINT [SETTINGS ...]
trained() {
  "$PYTHON" -m sft.train --config scripts/sft/nano.yaml --data "$2" --model "$3" \
    --output-dir "$1" --max-seconds "$SFT_SECONDS" "${@:4}"
}

if wanted gather; then
  gathered "$WORK/first" "$WORK/grow/checkpoint" 5120 30000 1
  finished gather
fi
if wanted sft; then
  trained "$WORK/sft-first" "$WORK/first/trajectories" "$WORK/grow/checkpoint"
  finished sft
fi
if wanted gather-again; then
  gathered "$WORK/second" "$WORK/sft-first/checkpoint" 6144 60000 2
  finished gather-again
fi
if wanted sft-again; then
  trained "$WORK/sft" "$WORK/second/trajectories" "$WORK/sft-first/checkpoint"
  finished sft-again
fi
if wanted careless; then
  "$PYTHON" -m sft.shapes_trajectories "$WORK/overlooked" --trajectories 2000 --careless 0.33 --seed 7
  "$PYTHON" -m sft.train --preset nano --data "$WORK/overlooked" --model "$WORK/sft/checkpoint" \
    --output-dir "$WORK/careless" --max-steps 50 --optimizer.lr 3e-4 --validation.every 0 \
    --packing.expected-tokens 900 --packing.max-tokens 1280 --packing.max-sample-tokens 1280
  finished careless
fi
if wanted gather-finer; then
  gathered "$WORK/third" "$WORK/sft/checkpoint" 6200 50000 2
  "$PYTHON" -m sft.finer "$WORK/sft/checkpoint" --side 168 --output-dir "$WORK/widened" \
    --sure-of-ten 0.8 --sure-of-ten-later 0.9 --glances 5
  finished gather-finer
fi
if wanted sft-finer; then
  # Half of the tokens are looks; four looks with 144 patches an image take 1,500 tokens.
  trained "$WORK/finer" "$WORK/third/trajectories" "$WORK/widened" \
    --packing.weights.controller 0.45 --packing.weights.whole 0.35 \
    --packing.weights.transition 0.08 --packing.weights.anchor 0.12 \
    --packing.expected-tokens 1200 --packing.max-tokens 1664 --packing.max-sample-tokens 1664
  finished sft-finer
fi
if wanted eval; then
  "$PYTHON" -m eval.run shapes553 compound hard --model "$WORK/finer/checkpoint" --seeds 0,1,2 \
    --edit-view both --batch-size 512 --output-dir "$WORK/eval" --overwrite
  finished eval
fi
