#!/usr/bin/env bash
# The same evaluation four times: in one process, again, in two, and killed and resumed. All must
# give one results.jsonl, byte for byte (CPU, a thread each). From anywhere:
#
#   bash scripts/eval/same_bytes.sh                                  # 12 rows, 3 seeds: minutes
#   LIMIT=553 OUTPUT_ROOT=outputs/same bash scripts/eval/same_bytes.sh --model DIR
#
# LIMIT        rows of shapes553; otherwise 12
# KILL_AFTER   seconds after which the fourth run is killed; otherwise 25
# OUTPUT_ROOT  outputs/same_bytes
# PYTHON_BIN   an interpreter that has the packages; otherwise .venv is made and used

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"
if [ -n "${PYTHON_BIN:-}" ]; then PYTHON="$PYTHON_BIN"; else setup; fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
OUT="${OUTPUT_ROOT:-outputs/same_bytes}"

run() { # NAME FLAGS...: an evaluation into $OUT/NAME
  local name="$1"
  shift
  "$PYTHON" -m umm_reflect eval shapes553 --limit "${LIMIT:-12}" --seeds 0,1,2 --batch-size 8 \
    --device cpu --output-dir "$OUT/$name" "$@"
}
run one "$@"
run again "$@"
run two --gpus 2 "$@"
timeout --signal=KILL "${KILL_AFTER:-25}" "$PYTHON" -m umm_reflect eval shapes553 \
  --limit "${LIMIT:-12}" --seeds 0,1,2 --batch-size 8 --device cpu --output-dir "$OUT/killed" "$@" || true
echo "killed after $(wc -l <"$OUT/killed/results.jsonl") lines"
run killed --resume "$@"
for name in again two killed; do
  cmp "$OUT/one/results.jsonl" "$OUT/$name/results.jsonl"
done
sha256sum "$OUT"/*/results.jsonl
