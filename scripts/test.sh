#!/usr/bin/env bash
# The default test suite, on the CPU. It fails on a failed test and on a skip without a good reason
# (tests/conftest.py lists the good ones).
#
#   bash scripts/test.sh [-k NAME] [tests/test_x.py] ...      # what follows goes to pytest
#
# UMM_PYTHON and UMM_PIP_ARGS: see scripts/_setup.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
setup dev

# One process a core, with one thread each (tests/conftest.py).
cd "$ROOT"
exec "$PYTHON" -m pytest -n logical --maxprocesses 8 --dist worksteal --durations 10 "$@"
