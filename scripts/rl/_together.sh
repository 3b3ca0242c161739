# Programs side by side, since one small model does not fill a GPU. Sourced by scripts of this folder,
# after _setup.sh and their arguments; WORK: where each program's words go, NAME.log. MOST: how many
# run at once. WORK and MODEL may be relative to where the script was started; OWN_PYTHON is used in
# place of .venv. From here on the script runs at the repository's root.
#
#   begin NAME COMMAND ...           # waits while MOST of them run
#   finish                           # waits for all; ends the script where one of them failed

mkdir -p "$WORK"
WORK="$(cd "$WORK" && pwd)"
if [ -n "$MODEL" ] && [ -d "$MODEL" ]; then MODEL="$(cd "$MODEL" && pwd)"; fi
MODEL="${MODEL:-pretrained/bagel-nano-shapes}"
if [ -n "$OWN_PYTHON" ]; then PYTHON="$OWN_PYTHON"; else setup; fi
cd "$ROOT"

NAMES=() PIDS=()
WORKERS=2 # that judge, of each program; the same on every machine, as a run's settings are
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

# A signal, or an error here, ends those that still run: trainers save first.
stop_all() {
  local pid
  for pid in "${PIDS[@]:-}"; do [ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null || true; done
  wait
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

alive() {
  local pid count=0
  for pid in "${PIDS[@]:-}"; do
    if [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; then count=$((count + 1)); fi
  done
  echo "$count"
}
begin() {
  local name="$1"
  shift
  while [ "$(alive)" -ge "$MOST" ]; do sleep 0.2; done
  echo "== $name: ${WORK}/$name.log"
  "$@" >"$WORK/$name.log" 2>&1 &
  NAMES+=("$name")
  PIDS+=($!)
}
finish() {
  local i code failed=0
  for i in "${!PIDS[@]}"; do
    code=0
    wait "${PIDS[$i]}" || code=$?
    if [ "$code" -ne 0 ]; then
      failed=1
      echo "error: ${NAMES[$i]} ended with code $code. The end of $WORK/${NAMES[$i]}.log:" >&2
      tail -n 5 "$WORK/${NAMES[$i]}.log" >&2
    fi
  done
  NAMES=() PIDS=()
  [ "$failed" -eq 0 ] || exit 1
}
