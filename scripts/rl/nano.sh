#!/usr/bin/env bash
# RL on whole trajectories of nano, every arm, on one GPU: what it changes against the start, with
# paired intervals on 553 prompts that were never trained on.
#
#   bash scripts/rl/nano.sh --model outputs/nano/careless/checkpoint       # a start that leaves room
#   bash scripts/rl/nano.sh --model DIR --seconds 480 --recipe mine.yaml --stages train
#   bash scripts/rl/nano.sh --seconds 60 --limit 4 --arms both,best-of-4 --seeds 1 -- --rollout.groups 2
#
# --arms A,B       both, words, images, other-view, best-of-4 (all of them)
#                    both        words and images learn, a run for each of --seeds
#                    words       only words; the other arms have the first of the seeds alone
#                    images      only images
#                    other-view  both, the edit drawn from the current image and the edit text alone
#                    best-of-4   of the start, no training: four first images, the own score picks
# --model FOLDER   what every arm starts from (pretrained/bagel-nano-shapes)
# --seeds A,B      of training (1,2,3)
# --seconds N      of training, each (480)
# --recipe NAME    a name of rl/recipes/ or a YAML file, of all arms (nano)
# --stages A,B     train, eval, table (all; what a stage needs lies in --work)
# --side-by-side N so many programs at once (6)
# --eval-seeds A,B sampling seeds of the evaluation, the same noise for all arms (0)
# --limit N        evaluate only so many rows, for a try
# --work FOLDER    where everything goes (outputs/rl-nano)
# --python PYTHON  an interpreter that has the packages; otherwise .venv is made and used
# -- ...           more settings of all training runs (umm-reflect rl --help)
#
# Leaves WORK/ablation.md, .json (rl/ablation.py), WORK/curves.png, .json, .txt (rl/compare.py), every run
# and every evaluation in a folder. Started again, runs go on from their newest state.
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"

ARMS=both,words,images,other-view,best-of-4 STAGES=train,eval,table
MODEL= SEEDS=1,2,3 SECONDS_EACH=480 RECIPE=nano MOST=6 EVAL_SEEDS=0 LIMIT= OWN_PYTHON=
WORK="$ROOT/outputs/rl-nano"
while [ $# -gt 0 ]; do
  case "$1" in
    --arms) ARMS="$2"; shift 2 ;;
    --model) MODEL="$2"; shift 2 ;;
    --seeds) SEEDS="$2"; shift 2 ;;
    --seconds) SECONDS_EACH="$2"; shift 2 ;;
    --recipe) RECIPE="$2"; shift 2 ;;
    --stages) STAGES="$2"; shift 2 ;;
    --side-by-side) MOST="$2"; shift 2 ;;
    --eval-seeds) EVAL_SEEDS="$2"; shift 2 ;;
    --limit) LIMIT="$2"; shift 2 ;;
    --work) WORK="$2"; shift 2 ;;
    --python) OWN_PYTHON="$2"; shift 2 ;;
    --) shift; break ;;
    *) echo "error: unknown argument $1. Known: --arms, --model, --seeds, --seconds, --recipe, --stages, --side-by-side, --eval-seeds, --limit, --work, --python, and after -- settings of all runs." >&2; exit 2 ;;
  esac
done
chosen() { [[ ",$1," == *",$2,"* ]]; } # LIST WORD
for word in ${ARMS//,/ }; do
  chosen both,words,images,other-view,best-of-4 "$word" ||
    { echo "error: there is no arm '$word'. Choose of both, words, images, other-view, best-of-4." >&2; exit 2; }
done
for word in ${STAGES//,/ }; do
  chosen train,eval,table "$word" || { echo "error: there is no stage '$word'. Choose of train, eval, table." >&2; exit 2; }
done
case "$RECIPE" in /*) ;; *.yaml | *.yml) RECIPE="$PWD/$RECIPE" ;; esac
source "$ROOT/scripts/rl/_together.sh"

# RUNS: names; of each the arm is what comes before its last dash
RUNS=()
if chosen "$ARMS" both; then for seed in ${SEEDS//,/ }; do RUNS+=("both-$seed"); done; fi
for arm in words images other-view; do
  if chosen "$ARMS" "$arm"; then RUNS+=("$arm-${SEEDS%%,*}"); fi
done

# The same model, side by side: one preflight for each view is enough.
if chosen "$STAGES" train; then
  checked=
  for run in ${RUNS[@]+"${RUNS[@]}"}; do
    view=full own=()
    case "$run" in
      words-*) own=(--flow.weight 0) ;;
      images-*) own=(--text.weight 0) ;;
      other-view-*) view=local ;;
    esac
    own+=(--rollout.edit-view "$view")
    if chosen "$checked" "$view"; then own+=(--no-preflight); fi
    checked+=",$view"
    begin "$run" "$PYTHON" -m rl.train --recipe "$RECIPE" --model "$MODEL" --output-dir "$WORK/$run" \
      --seed "${run##*-}" --max-seconds "$SECONDS_EACH" --max-steps 100000 \
      --judge.set "workers=$WORKERS" --tokens-per-forward 65536 "${own[@]}" "$@"
  done
  finish
fi

evaluated() { # NAME MODEL ARGUMENTS
  local name="$1" model="$2"
  shift 2
  begin "eval-$name" "$PYTHON" -m eval.run hard553 --model "$model" --output-dir "$WORK/eval-$name" --overwrite \
    --seeds "$EVAL_SEEDS" --batch-size 553 --workers "$WORKERS" ${LIMIT:+--limit "$LIMIT"} "$@"
}
if chosen "$STAGES" eval; then
  view=full
  if chosen "$ARMS" other-view; then view=both; fi
  evaluated start "$MODEL" --edit-view "$view"
  if chosen "$ARMS" best-of-4; then evaluated best-of-4 "$MODEL" --edit-view full --best-of 4; fi
  for run in ${RUNS[@]+"${RUNS[@]}"}; do
    case "$run" in other-view-*) view=local ;; *) view=full ;; esac
    evaluated "$run" "$WORK/$run/checkpoint" --edit-view "$view"
  done
  finish
fi

if chosen "$STAGES" table; then
  RESULTS=("start=$WORK/eval-start")
  for run in ${RUNS[@]+"${RUNS[@]}"}; do RESULTS+=("${run%-*}=$WORK/eval-$run"); done
  if chosen "$ARMS" best-of-4; then RESULTS+=(--best-of "$WORK/eval-best-of-4"); fi
  "$PYTHON" -m rl.ablation "${RESULTS[@]}" --output "$WORK/ablation.md"
  if [ "${#RUNS[@]}" -gt 0 ]; then
    "$PYTHON" -m rl.compare "${RUNS[@]/#/$WORK/}" --output "$WORK/curves.png"
  fi
fi
