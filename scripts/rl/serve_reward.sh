#!/usr/bin/env bash
# A reward service for RL and evaluation on other machines or processes. From anywhere:
#
#   bash scripts/rl/serve_reward.sh                         # GenEval's verifier on 127.0.0.1:18092
#   REWARD=ocr REWARD_PORT=18093 bash scripts/rl/serve_reward.sh --idle-offload 60
#   REWARD=reward.yaml bash scripts/rl/serve_reward.sh --host 0.0.0.0 --token-file token.txt
#
# REWARD         a reward's name or a YAML file (geneval)
# REWARD_PORT    18092
# REWARD_DEVICE  where its networks run, for example cuda:1; otherwise what the reward chooses
# PYTHON_BIN     the Python to run with; otherwise .venv is made and used (scripts/_setup.sh)
#
# What follows goes to `umm-reflect serve-reward` (--help lists it). It listens on this machine only
# unless --host says otherwise.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"
if [ -n "${PYTHON_BIN:-}" ]; then
  PYTHON="$PYTHON_BIN"
elif [ "${REWARD:-geneval}" = ocr ]; then
  setup serve,ocr
else
  setup serve
fi

ARGUMENTS=(--reward "${REWARD:-geneval}" --port "${REWARD_PORT:-18092}")
[ -z "${REWARD_DEVICE:-}" ] || ARGUMENTS+=(--device "$REWARD_DEVICE")
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
exec "$PYTHON" -m umm_reflect serve-reward "${ARGUMENTS[@]}" "$@"
