#!/usr/bin/env bash
# Train on rewards of single images: OCR, PickScore, SpectraReward and their like.
#
#   bash scripts/rl/serve_reward.sh &                        # or another judge, see the recipe
#   RECIPE=ocr-lora RL_INIT_DIR=models/BAGEL bash scripts/rl/train_single.sh
#   RECIPE=pickscore-lora bash scripts/rl/train_single.sh --prompts data/pickscore/train.parquet
#
# RECIPE       ocr-lora (otherwise this one), ocr-lora-npu, pickscore-lora, pickscore-full,
#              spectra-awm, self-spectra-awm, nft, or a YAML file
# All else, and how several GPUs and machines are used: scripts/rl/train_rl.sh

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../_setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/../_launch.sh"
launch_rl ocr-lora "$@"
