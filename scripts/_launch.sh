# Starts a trainer: on one GPU, on all GPUs of a machine, on several machines, or on the CPU. Sourced
# by the training scripts, after _setup.sh:
#
#   launch VERB ARGUMENTS            # umm-reflect VERB ARGUMENTS; does not return
#
# The variables it reads are described in scripts/sft/train_sft.sh.

fail() { # WHAT REMEDY
  echo "error: $1. $2" >&2
  exit 2
}
number() { # NAME VALUE LEAST
  [[ "$2" =~ ^[0-9]+$ ]] && [ "$2" -ge "$3" ] ||
    fail "$1 is '$2'" "Give a whole number, $3 or more"
}
given() { # FLAG ARGUMENTS: whether the flag is among them
  local flag="$1" word
  shift
  for word in "$@"; do
    case "$word" in "$flag" | "$flag="*) return 0 ;; esac
  done
  return 1
}
# A launcher that gets a signal kills its processes 30 seconds later, whether they have saved or
# not. So the first one goes to them, and the launcher ends when they have.
processes() {
  cat /proc/"$1"/task/*/children 2>/dev/null || pgrep -P "$1" || true
}
forward() {
  local to
  to="$(processes "$RUNNING")"
  echo "saving; another signal ends it at once" >&2
  trap 'kill -KILL $(processes "$RUNNING") 2>/dev/null; kill "$RUNNING"' TERM INT
  # one number a word
  [ -z "$to" ] || kill -TERM $to 2>/dev/null || true
}

launch() { # VERB ARGUMENTS
  local VERB="$1"
  shift
  NNODES="${NNODES:-1}" NODE_RANK="${NODE_RANK:-0}" LAUNCHER="${LAUNCHER:-torchrun}"
  number NNODES "$NNODES" 1
  number NODE_RANK "$NODE_RANK" 0
  [ "$NODE_RANK" -lt "$NNODES" ] ||
    fail "NODE_RANK is $NODE_RANK with $NNODES machine(s)" "Machines count from 0 to NNODES - 1"
  [ "$NNODES" -eq 1 ] || [ -n "${MASTER_ADDR:-}" ] ||
    fail "MASTER_ADDR is not set" "Name machine 0 as the others reach it: MASTER_ADDR=10.0.0.1"
  if [ -n "${MASTER_PORT:-}" ]; then number MASTER_PORT "$MASTER_PORT" 1; fi
  if [ -n "${NPROC:-}" ]; then number NPROC "$NPROC" 1; fi
  case "$LAUNCHER" in
    torchrun)
      [ -z "${ACCELERATE_CONFIG:-}" ] ||
        fail "ACCELERATE_CONFIG goes with another launcher" "Set LAUNCHER=accelerate too" ;;
    accelerate)
      CONFIG="${ACCELERATE_CONFIG:-fsdp2}"
      [ -f "$CONFIG" ] || CONFIG="$ROOT/scripts/accelerate/${ACCELERATE_CONFIG:-fsdp2}.yaml"
      [ -f "$CONFIG" ] || fail "there is no ACCELERATE_CONFIG ${ACCELERATE_CONFIG:-fsdp2}" \
        "Give a file, or one of: $(cd "$ROOT/scripts/accelerate" && echo *.yaml | sed 's/\.yaml//g')" ;;
    *) fail "there is no LAUNCHER $LAUNCHER" "Choose torchrun or accelerate" ;;
  esac
  if [ -n "${RUN_DIR:-}" ]; then
    ! given --output-dir "$@" || fail "RUN_DIR and --output-dir are both given" "Give one of them"
    set -- "$@" --output-dir "$RUN_DIR"
  fi

  if [ -n "${PYTHON_BIN:-}" ]; then
    PYTHON="$PYTHON_BIN"
  else
    case "${CONFIG:-}" in *zero*) setup deepspeed ;; *) setup train ;; esac
  fi
  cd "$ROOT"
  export TOKENIZERS_PARALLELISM=false PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

  GPUS="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" ||
    fail "$PYTHON cannot import torch" "Leave PYTHON_BIN out, or name an interpreter that has it"
  if [ -z "${NPROC:-}" ]; then NPROC=$((GPUS > 0 ? GPUS : 1)); fi
  [ "$GPUS" -eq 0 ] || [ "$NPROC" -le "$GPUS" ] ||
    fail "NPROC is $NPROC, but this machine shows $GPUS GPU(s)" "Set NPROC to at most $GPUS"

  if [ "$LAUNCHER" = torchrun ] && [ "$NPROC" -eq 1 ] && [ "$NNODES" -eq 1 ]; then
    exec "$PYTHON" -m umm_reflect "$VERB" "$@"
  fi

  THREADS=$(($(getconf _NPROCESSORS_ONLN) / NPROC))
  THREADS=$((THREADS > 8 ? 8 : THREADS < 1 ? 1 : THREADS))
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$THREADS}"
  ADDRESS="${MASTER_ADDR:-127.0.0.1}" PORT="${MASTER_PORT:-29500}"
  if [ "$LAUNCHER" = torchrun ]; then
    LAUNCH=("$PYTHON" -m torch.distributed.run --nproc-per-node "$NPROC")
    if [ "$NNODES" -eq 1 ] && [ -z "${MASTER_PORT:-}" ]; then
      LAUNCH+=(--standalone --local-addr 127.0.0.1)
    else
      LAUNCH+=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$ADDRESS" --master-port "$PORT")
    fi
  else
    [ "$NNODES" -gt 1 ] || PORT="${MASTER_PORT:-0}" # 0: a free one
    LAUNCH=("$PYTHON" -m accelerate.commands.launch --config_file "$CONFIG"
      --num_processes "$((NPROC * NNODES))" --num_machines "$NNODES" --machine_rank "$NODE_RANK"
      --main_process_ip "$ADDRESS" --main_process_port "$PORT")
    if ! given --strategy "$@"; then
      case "$(basename "$CONFIG")" in
        zero*) set -- "$@" --strategy deepspeed ;;
        ddp.yaml) set -- "$@" --strategy ddp ;;
        fsdp2.yaml) set -- "$@" --strategy fsdp2 ;;
      esac
    fi
  fi

  "${LAUNCH[@]}" -m umm_reflect "$VERB" "$@" &
  RUNNING=$!
  trap forward TERM INT
  while true; do
    CODE=0
    wait "$RUNNING" || CODE=$?
    kill -0 "$RUNNING" 2>/dev/null || exit "$CODE"
  done
}

launch_rl() { # RECIPE ARGUMENTS: `launch rl` with the variables of scripts/rl/train_rl.sh
  local recipe="${RECIPE:-$1}"
  shift
  given --recipe "$@" || set -- --recipe "$recipe" "$@"
  if [ -n "${RL_INIT_DIR:-}" ]; then
    ! given --model "$@" || fail "RL_INIT_DIR and --model are both given" "Give one of them"
    set -- "$@" --model "$RL_INIT_DIR"
  fi
  if [ -n "${REWARD_URL:-}" ]; then
    ! given --judge.reward "$@" || fail "REWARD_URL and --judge.reward are both given" "Give one of them"
    set -- "$@" --judge.reward http --judge.set "url=$REWARD_URL"
  fi
  launch rl "$@"
}
