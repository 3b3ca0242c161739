#!/usr/bin/env bash
# Train on rewards: whole trajectories in groups. On one GPU, on all of a machine, on several, or on
# the CPU.
#
#   bash scripts/rl/train_rl.sh                                             # nano, on what is here
#   RECIPE=reflection RL_INIT_DIR=outputs/rl_init REWARD_URL=http://10.0.0.9:18092 \
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash scripts/rl/train_rl.sh  # on each machine
#
# What follows goes to `umm-reflect rl` (--help lists it). Started again, a run goes on from its newest
# state; SIGTERM or Ctrl-C saves one.
#
# RECIPE       a name of rl/recipes/ or a YAML file; otherwise nano
# RL_INIT_DIR  the model to start from (scripts/rl/make_rl_init.sh makes one); otherwise the recipe's
# REWARD_URL   a service that judges (scripts/rl/serve_reward.sh); otherwise the recipe's reward
# NPROC NNODES NODE_RANK MASTER_ADDR MASTER_PORT RUN_DIR LAUNCHER ACCELERATE_CONFIG PYTHON_BIN: as in
# scripts/sft/train_sft.sh

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/../_launch.sh"
launch_rl nano "$@"
