#!/usr/bin/env bash
# The reward model of SpectraReward behind vLLM's own HTTP, as the adapter's card starts it:
#
#   bash scripts/serve_spectrareward.sh MODEL [HOST 127.0.0.1] [PORT 18090] [DATA_PARALLEL 1] [...]
#   bash scripts/serve_spectrareward.sh Qwen/Qwen3-VL-30B-A3B-Instruct 0.0.0.0 18090 8
#
# and what asks it (umm-reflect reward check --reward spectra, a trainer, ...) is told where it is:
#
#   export SPECTRAREWARD_MODEL_ID=Qwen/Qwen3-VL-30B-A3B-Instruct SPECTRAREWARD_URL=http://HOST:18090
#
# What follows the fourth word goes to `vllm serve`. VLLM names the program (vllm): it brings a torch
# of its own, so give it an environment of its own: python -m venv .venv-vllm &&
# .venv-vllm/bin/pip install vllm; VLLM=.venv-vllm/bin/vllm bash scripts/serve_spectrareward.sh ...
# VLLM_API_KEY, where it is set, is asked of every caller, who gives it as OPENAI_API_KEY.

set -euo pipefail
fail() {
  echo "error: $1. $2" >&2
  exit "${3:-1}"
}

[ $# -ge 1 ] && [ -n "$1" ] && [ "${1#-}" = "$1" ] ||
  fail "no model is named" "bash $0 MODEL [HOST] [PORT] [DATA_PARALLEL]" 2
MODEL="$1" HOST="${2:-127.0.0.1}" PORT="${3:-18090}" PARALLEL="${4:-1}"
shift $(($# < 4 ? $# : 4))
case "$PORT$PARALLEL" in
  *[!0-9]*) fail "PORT is $PORT and DATA_PARALLEL is $PARALLEL" "Both are whole numbers" 2 ;;
esac
[ "$PARALLEL" -ge 1 ] || fail "DATA_PARALLEL is $PARALLEL" "Give the number of replicas" 2

VLLM="${VLLM:-vllm}"
command -v "$VLLM" >/dev/null 2>&1 ||
  fail "there is no program $VLLM" "Install vLLM in an environment of its own and set VLLM (see $0)"
case "$HOST" in
  127.0.0.1 | localhost | ::1) ;;
  *)
    [ -n "${VLLM_API_KEY:-}" ] ||
      echo "warning: whoever reaches $HOST:$PORT can use this service; VLLM_API_KEY asks for a key" >&2
    ;;
esac

# --max-num-batched-tokens: the log-probabilities of a prompt take [tokens, vocabulary] in fp32.
exec "$VLLM" serve "$MODEL" --served-model-name "$MODEL" --host "$HOST" --port "$PORT" \
  --data-parallel-size "$PARALLEL" --max-num-batched-tokens 8192 \
  --limit-mm-per-prompt '{"image": 1}' "$@"
