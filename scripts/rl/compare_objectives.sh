#!/usr/bin/env bash
# FlowGRPO, AWM and DiffusionNFT on single images of nano, at equal GPU seconds: the three runs side by
# side on one GPU (or a CPU), their curves in one picture, and first images on hard553.
#
#   bash scripts/rl/compare_objectives.sh                                  # the shipped nano, 300 s each
#   bash scripts/rl/compare_objectives.sh --model outputs/nano/sft/checkpoint --seconds 400 --work outputs/objectives
#   bash scripts/rl/compare_objectives.sh --seconds 60 --limit 8 -- --rollout.groups 2 --rollout.group-size 4
#
# --model FOLDER   what all three start from (pretrained/bagel-nano-shapes)
# --seconds N      of training, each (300)
# --work FOLDER    where everything goes (outputs/objectives)
# --seed N         of all three: they get the same prompts (0)
# --limit N        evaluate only so many rows, for a try
# --python PYTHON  an interpreter that has the packages; otherwise .venv is made and used
# -- ...           more settings of all three (umm-reflect rl --help)
#
# Leaves WORK/curves.png, .json, .txt (rl/compare.py), WORK/first_images.md, .json (rl/ablation.py: paired
# differences to the start), and each run in a folder. Started again, runs go on from their newest state.
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"

MODEL= SECONDS_EACH=300 WORK="$ROOT/outputs/objectives" SEED=0 LIMIT= OWN_PYTHON=
while [ $# -gt 0 ]; do
  case "$1" in
    --model) MODEL="$2"; shift 2 ;;
    --seconds) SECONDS_EACH="$2"; shift 2 ;;
    --work) WORK="$2"; shift 2 ;;
    --seed) SEED="$2"; shift 2 ;;
    --limit) LIMIT="$2"; shift 2 ;;
    --python) OWN_PYTHON="$2"; shift 2 ;;
    --) shift; break ;;
    *) echo "error: unknown argument $1. Known: --model, --seconds, --work, --seed, --limit, --python, and after -- settings of all runs." >&2; exit 2 ;;
  esac
done
MOST=4
source "$ROOT/scripts/rl/_together.sh"

RUNS=(nano-single nano-awm nano-nft)
for run in "${RUNS[@]}"; do
  begin "$run" "$PYTHON" -m rl.train --recipe "$run" --model "$MODEL" --output-dir "$WORK/$run" --seed "$SEED" \
    --max-seconds "$SECONDS_EACH" --max-steps 100000 \
    --judge.set "workers=$WORKERS" "$@"
done
finish
"$PYTHON" -m rl.compare "${RUNS[@]/#/$WORK/}" --output "$WORK/curves.png"

evaluated() { # NAME MODEL: first images alone
  begin "eval-$1" "$PYTHON" -m eval.run hard553 --model "$2" --output-dir "$WORK/eval-$1" --overwrite \
    --max-rounds 0 --batch-size 553 --workers "$WORKERS" ${LIMIT:+--limit "$LIMIT"}
}
evaluated start "$MODEL"
RESULTS=("start=$WORK/eval-start")
for run in "${RUNS[@]}"; do
  evaluated "$run" "$WORK/$run/checkpoint"
  RESULTS+=("$run=$WORK/eval-$run")
done
finish
"$PYTHON" -m rl.ablation "${RESULTS[@]}" --output "$WORK/first_images.md"
