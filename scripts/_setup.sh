# Makes .venv once and installs this checkout in it. Sourced by the other scripts:
#
#   source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"             # sets $ROOT and $PYTHON
#   setup [EXTRA]                                                 # e.g. setup dev
#
# UMM_PYTHON    the Python (>= 3.11) to build .venv with; otherwise the first one found is taken
# UMM_PIP_ARGS  more arguments for pip, e.g. "--extra-index-url URL" for a CPU build of torch
#
# The second start compares one stamp (pyproject.toml, constraints.txt, place, arguments) and goes on.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"

_setup_fail() { # WHAT REMEDY
  echo "error: $1. $2" >&2
  exit 1
}

_setup_find_python() {
  local candidate check='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
  for candidate in ${UMM_PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
    if "$candidate" -c "$check" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

_setup_stamp() { # EXTRA
  printf '%s\n' "$ROOT" "${1:-}" "${UMM_PIP_ARGS:-}"
  cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt"
}

_setup_explain() { # LOG: the remedy for the failure that the log shows
  if grep -qi 'no space left' "$1"; then
    echo "The disk is full: free about 4 GB (a CUDA build of torch needs about 8 GB) and start again."
  elif grep -qiE 'connection|timed out|timeout|resolve host|name resolution|proxy|ssl' "$1"; then
    echo "The package index was not reached: check the network, or name a mirror: UMM_PIP_ARGS='--index-url URL'."
  elif grep -qiE 'no matching distribution|could not find a version' "$1"; then
    echo "No fitting build of a package for this Python: try another one: rm -rf .venv; UMM_PYTHON=python3.12 bash $0"
  else
    echo "Start again after mending it; the whole log is $1."
  fi
}

_setup_install() { # EXTRA
  local extra="${1:-}" found log="$ROOT/.venv/install.log" quiet="-qq --progress-bar off"
  local stamp="$ROOT/.venv/installed${extra:+-$extra}"

  if [ -e "$ROOT/.venv" ] && ! "$PYTHON" -c '' >/dev/null 2>&1; then
    _setup_fail "$ROOT/.venv holds no working Python" "Remove it and start again: rm -rf '$ROOT/.venv'"
  fi
  if [ -e "$stamp" ] && _setup_stamp "$extra" | cmp -s - "$stamp"; then
    return
  fi
  if [ ! -e "$ROOT/.venv" ]; then
    found="$(_setup_find_python)" || _setup_fail \
      "no Python >= 3.11 with venv was found (looked at: ${UMM_PYTHON:-python3, python3.11 to 3.14, python})" \
      "Install one (Debian: apt-get install python3 python3-venv), or name it: UMM_PYTHON=/path/to/python bash $0"
    echo "making .venv with $found ($("$found" --version 2>&1))" >&2
    "$found" -m venv "$ROOT/.venv" || _setup_fail \
      "'$found -m venv .venv' failed" "See above; another Python can be named: UMM_PYTHON=/path/to/python"
  fi

  echo "installing packages into .venv (once, some minutes; log: .venv/install.log)" >&2
  [ -t 2 ] && quiet=
  rm -f "$log"
  # UMM_PIP_ARGS is split into words on purpose.
  if ! (cd "$ROOT" && "$PYTHON" -m pip install $quiet --disable-pip-version-check --log "$log" \
    -c constraints.txt ${UMM_PIP_ARGS:-} -e ".${extra:+[$extra]}" 1>&2); then
    _setup_fail "pip could not install the packages (see above)" "$(_setup_explain "$log")"
  fi
  _setup_stamp "$extra" >"$stamp.new" && mv "$stamp.new" "$stamp"
}

setup() { # EXTRA; two scripts started together wait for one another where flock exists
  if command -v flock >/dev/null 2>&1; then
    exec 9>"$ROOT/.venv.lock"
    flock 9
    _setup_install "$@"
    exec 9>&-
  else
    _setup_install "$@"
  fi
}
