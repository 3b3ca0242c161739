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

_setup_wanted() { # what an install depends on
  printf '%s\n' "$ROOT"
  cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt"
}

_setup_is_done() { # EXTRA: installed as wanted, and with the arguments that are asked for, if any
  local stamp="$ROOT/.venv/installed${1:+-$1}" arguments="$ROOT/.venv/installed-with"
  [ -e "$stamp" ] && _setup_wanted | cmp -s - "$stamp" || return 1
  [ -z "${UMM_PIP_ARGS:-}" ] || [ "$UMM_PIP_ARGS" = "$(cat "$arguments" 2>/dev/null)" ]
}

_setup_explain() { # LOG: the remedy for the failure that the log shows
  local errors
  errors="$(grep -E 'ERROR:|WARNING: Retrying' "$1" 2>/dev/null)" || true
  case "$errors" in
    *'No space left'*)
      echo "The disk is full: free 4 GB (8 GB for a CUDA build of torch) and start again." ;;
    *Retrying* | *'onnection'* | *'timed out'*)
      echo "The package index was not reached: check the network, or name a mirror:" \
        "UMM_PIP_ARGS='--index-url URL' bash $0" ;;
    *'No matching distribution'* | *'Could not find a version'*)
      echo "A package has no build for this Python: try another one:" \
        "rm -rf .venv; UMM_PYTHON=python3.12 bash $0" ;;
    *) echo "Start again after mending it; the whole log is $1" ;;
  esac
}

_setup_pip() { # LOG ARGUMENTS: pip's progress for a person, only its errors for a log
  local log="$1"
  shift
  rm -f "$log" "$log.errors"
  if [ -t 2 ]; then
    "$PYTHON" -m pip install --disable-pip-version-check --log "$log" "$@" >&2
  elif ! "$PYTHON" -m pip install -q --disable-pip-version-check --progress-bar off --log "$log" \
    "$@" >/dev/null 2>"$log.errors"; then
    cat "$log.errors" >&2
    return 1
  fi
}

_setup_install() { # EXTRA
  local extra="${1:-}" found log="$ROOT/.venv/install.log" done_file

  if [ -e "$ROOT/.venv" ] && ! "$PYTHON" -c '' >/dev/null 2>&1; then
    _setup_fail "$ROOT/.venv holds no working Python" "Remove it and start again: rm -rf '$ROOT/.venv'"
  fi
  if _setup_is_done "$extra"; then
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

  "$PYTHON" -c 'import pip' 2>/dev/null || _setup_fail \
    "$ROOT/.venv is incomplete (no pip)" "Remove it and start again: rm -rf '$ROOT/.venv'"
  echo "installing packages into .venv (once, some minutes; log: .venv/install.log)" >&2
  # UMM_PIP_ARGS is split into words on purpose.
  if ! (cd "$ROOT" && _setup_pip "$log" -c constraints.txt ${UMM_PIP_ARGS:-} \
    -e ".${extra:+[$extra]}"); then
    _setup_fail "pip could not install the packages (log: $log)" "$(_setup_explain "$log")"
  fi
  printf '%s' "${UMM_PIP_ARGS:-}" >"$ROOT/.venv/installed-with"
  for done_file in installed ${extra:+installed-$extra}; do # what has an extra has the core too
    _setup_wanted >"$ROOT/.venv/$done_file.new"
    mv "$ROOT/.venv/$done_file.new" "$ROOT/.venv/$done_file"
  done
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
