#!/usr/bin/env bash
# Draw, look, say what is wrong, edit, stop: the whole loop on a small model that comes with the
# repository, on the CPU, after one install.
#
#   bash scripts/reflect.sh "two red circles and a blue square" [--seed 1] [--model DIR|ID] ...
#
# Everything after the script's name goes to `umm-reflect reflect` (--help lists it).
# UMM_PYTHON and UMM_PIP_ARGS: see scripts/_setup.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
setup

exec "$PYTHON" -m umm_reflect reflect "$@"
