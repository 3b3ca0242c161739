#!/usr/bin/env bash
# Train on trajectories: on one GPU, on all GPUs of a machine, on several machines, or on the CPU.
#
#   bash scripts/sft/train_sft.sh --data data/mine --preset lora                 # every GPU here
#   NPROC=1 RUN_DIR=outputs/mine bash scripts/sft/train_sft.sh --data data/mine  # one of them
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash scripts/sft/train_sft.sh ...  # on each machine
#   LAUNCHER=accelerate ACCELERATE_CONFIG=zero3 bash scripts/sft/train_sft.sh .. # DeepSpeed, NPU
#
# Everything after the script's name goes to `umm-reflect sft` (--help lists it). Started again, a
# run goes on from its newest state; SIGTERM or Ctrl-C saves one (the second one does not wait).
#
# NPROC                   processes on this machine; otherwise its GPUs, or 1
# NNODES, NODE_RANK       machines, and which one this is, from 0; otherwise 1 and 0
# MASTER_ADDR MASTER_PORT where machine 0 is reached; the port is otherwise 29500
# RUN_DIR                 the same as --output-dir; all machines must see it
# LAUNCHER                torchrun (default), or accelerate with
# ACCELERATE_CONFIG       ddp, fsdp2, zero2, zero3, npu (scripts/accelerate/*.yaml) or a file
# PYTHON_BIN              an interpreter that has the packages; otherwise .venv is made and used

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/../_launch.sh"
launch sft "$@"
