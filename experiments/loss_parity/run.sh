#!/usr/bin/env bash
# 300 steps in bf16 and in FP8-Flow from the same initialization on the same data: torchtitan's debugmodel and a 16B-shaped
# model with 4 layers on one GPU, and the latter with expert parallelism on four.
#
#     ./experiments/loss_parity/run.sh OUT debugmodel_1gpu 16B_short_1gpu 16B_short_ep4
set -euo pipefail
. "$(dirname "$0")/../../tools/environment.sh" matplotlib tensorboard
OUT=$1
shift

export STEPS=300 CONFIG_FILE=train_configs/debugmodel.toml
common=(--lr_scheduler.warmup_steps 20)
short=(--model.flavor 16B_short --training.seq_len 4096 --training.local_batch_size 4 --optimizer.lr 3e-4
    --activation_checkpoint.mode none)

for name in "$@"; do
    case $name in
    debugmodel_1gpu) NGPU=1 overrides=("${common[@]}") ;;
    16B_short_1gpu) NGPU=1 overrides=("${common[@]}" "${short[@]}") ;;
    16B_short_ep4) NGPU=4 overrides=("${common[@]}" "${short[@]}" --parallelism.expert_parallel_degree 4) ;;
    *) echo "unknown run $name" >&2 && exit 2 ;;
    esac
    runs=outputs/loss_parity/$name
    NGPU=$NGPU OUT=$runs ./tools/quickstart.sh "${overrides[@]}"
    mkdir -p "$OUT/$name"
    cp "$runs/curves.png" "$runs/comparison.json" "$OUT/$name"
    gzip -9c "$runs/bf16.log" >"$OUT/$name/bf16.log.gz"
    gzip -9c "$runs/fp8_flow.log" >"$OUT/$name/fp8_flow.log.gz"
    python3 -m experiments.loss_parity.records "$OUT/$name" "${overrides[*]}"
done
