#!/usr/bin/env bash
# Three runs a seed by torchtitan's command line: FP8, the strongest bf16 of experiments/throughput, and that bf16 again
# with one bit of one initial weight changed, the yardstick.
#
#     python tools/build_corpus.py --out outputs/corpus_large --set large
#     bash experiments/convergence/pairs.sh 1 2 3    # of these seeds
#
# Runs that have ended are left alone. The last lines compare all runs; W&B has them offline, as a group. A seed decides
# the initial weights; all runs read the same text in the same order, each token once.
#
# RUNS   which of the three (default "bf16 fp8 bf16_bit"), so that several cards can share them
# FLAGS  overrides of torchtitan for all runs
# WORK   folder of the runs (default outputs/pairs)
# NGPU   GPUs of a run (default 1)
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" CONFIG_FILE=train_configs/deepseek_v3_16b_short.toml
work=${WORK:-outputs/pairs} corpus=outputs/corpus_large
export WANDB_MODE=offline WANDB_PROJECT=titan_fp8moe
WANDB_RUN_GROUP=pairs-$(basename "$work")
export WANDB_RUN_GROUP
read -ra flags <<<"${FLAGS:-}"
fp8=(--model.converters fp8_flow_moe --parallelism.expert_parallel_degree "${NGPU:-1}")
bf16=save_grouped_mm,fused_bf16,whole_blocks

run() { # name, seed, flags
    export WANDB_RUN_NAME=$1
    [ -e "$work/$1/done" ] && return
    rm -rf "${work:?}/$1"
    ./tools/run_train.sh --job.dump_folder "$work/$1" --job.custom_config_module experiments.throughput.setting \
        --model.flavor 16B_6_layers_sdpa_8k --model.hf_assets_path $corpus/tokenizer --training.dataset_path $corpus/train \
        --debug.seed "$2" --optimizer.lr 4e-4 --lr_scheduler.warmup_steps 50 --lr_scheduler.decay_type linear \
        --training.steps 288 --training.global_batch_size 8 --activation_checkpoint.mode selective --metrics.log_freq 1 \
        --metrics.enable_wandb --validation.enable --validation.freq 288 --validation.steps 64 \
        --validation.dataset c4_test --validation.dataset_path $corpus/validation --validation.seq_len 4096 \
        --validation.local_batch_size 4 "${@:3}" "${flags[@]}"
    touch "$work/$1/done"
}

for seed in "$@"; do
    for name in ${RUNS:-bf16 fp8 bf16_bit}; do
        case $name in
        fp8) run "fp8-s$seed" "$seed" "${fp8[@]}" ;;
        bf16) run "bf16-s$seed" "$seed" --model.converters "$bf16" ;;
        bf16_bit) run "bf16_bit-s$seed" "$seed" --model.converters "$bf16,changed_bit" ;;
        esac
    done
done
runs=()
for folder in "$work"/bf16-s* "$work"/fp8-s* "$work"/bf16_bit-s*; do
    [ -e "$folder/done" ] && runs+=(--run "$(basename "$folder")=$folder")
done
python3 tools/compare_losses.py "${runs[@]}" --smooth 25 --save "$work/losses.json.xz" --out "$work/curves.png"
