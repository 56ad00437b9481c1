#!/usr/bin/env bash
# Trains a DeepSeek-V3 in bf16 and in FP8 on the Python sources of this machine, draws both loss curves and compares
# losses, tokens/s and memory. On a Hopper GPU the model has four of the 16B model's layers, 100 steps and torch.compile;
# on a CPU it has 6M parameters and 200 steps. Either takes about four minutes. Fails if the losses differ by more than 1%
# at the end.
#
# With --torchtitan03 as the first argument torchtitan 0.3's debug model trains for 40 steps, in an environment of its own.
#
# STEPS, NGPU, CONFIG_FILE (for 0.3 the name of a config function) and OUT (the results' folder) may be set; arguments are
# torchtitan overrides for both runs.
set -euo pipefail
torchtitan=0.2.2 results=outputs/quickstart
if [ "${1-}" = --torchtitan03 ]; then
    shift
    torchtitan=0.3.0 results=outputs/quickstart03
fi
. "$(dirname "$0")/environment.sh" matplotlib tensorboard

export NGPU=${NGPU:-1}
OUT=${OUT:-$results}
device=$(python3 -c "
import torch
gpu = torch.cuda.is_available()
print('cpu' if not gpu else 'hopper' if torch.cuda.get_device_capability()[0] == 9 else torch.cuda.get_device_name())")
case $torchtitan-$device in
0.2.2-hopper) default=train_configs/deepseek_v3_16b_short.toml steps=100 ;;
0.2.2-cpu) default=train_configs/debug.toml steps=200 ;;
0.3.0-hopper | 0.3.0-cpu) default=deepseek_v3_debugmodel steps=40 ;;
*)
    echo "The quickstart has settings for Hopper GPUs and CPUs, not for $device: CUDA_VISIBLE_DEVICES= $0 trains on the CPU." >&2
    exit 2
    ;;
esac
export CONFIG_FILE=${CONFIG_FILE:-$default}
STEPS=${STEPS:-$steps}

if [ $torchtitan = 0.2.2 ]; then
    check() { python3 tools/launch.py python3 -m titan_fp8moe.torchtitan.dry_run "$CONFIG_FILE" "$@"; }
    run() { ./tools/run_train.sh --job.dump_folder "$@"; }
else
    data="--hf_assets_path outputs/corpus/tokenizer --dataloader.dataset c4_test --dataloader.dataset_path outputs/corpus/train"
    settings="--config $CONFIG_FILE $data --training.seq_len 256 --training.local_batch_size 4"
    settings+=" --lr_scheduler.warmup_steps $STEPS"  # after a shorter warm-up both losses jump, and part
    check() { python3 tools/launch.py python3 -m titan_fp8moe.torchtitan03.dry_run $settings "$@"; }
    run() {
        python3 tools/launch.py torchrun --standalone --nproc_per_node="$NGPU" --local-ranks-filter=0 --role=rank --tee=3 \
            -m torchtitan.train --module titan_fp8moe.torchtitan03 $settings --dump_folder "$@"
    }
fi

if ! python3 tools/build_corpus.py --out outputs/corpus; then
    echo "To build it anew: python3 tools/build_corpus.py --out outputs/corpus --force" >&2
    exit 2
fi
mkdir -p "$OUT"
echo "Checking $CONFIG_FILE"
if ! check --world-size "$NGPU" "$@" >"$OUT/dry_run.txt"; then
    tail -n 1 "$OUT/dry_run.txt" >&2
    exit 2
fi

train() {  # name, overrides
    local name=$1
    shift
    echo "Training $name for $STEPS steps; the log is $OUT/$name.log"
    rm -rf "${OUT:?}/$name"
    run "$OUT/$name" --training.steps "$STEPS" --metrics.log_freq 1 \
        --metrics.enable_tensorboard --metrics.disable_color_printing --debug.seed 0 "$@" 2>&1 |
        tee "$OUT/$name.log" | python3 tools/progress.py "$name" "$STEPS" || {
        echo "$name failed: $(tail -n 1 "$OUT/$name.log")" >&2
        exit 1
    }
}

train bf16 --fp8_flow_moe.filter_fqns layers "$@"
train fp8_flow "$@"
status=0
python3 tools/compare_losses.py --run "bf16=$OUT/bf16" --run "fp8_flow=$OUT/fp8_flow" --tolerance 0.01 \
    --out "$OUT/curves.png" --json "$OUT/comparison.json" >"$OUT/table.txt" || status=$?
cat "$OUT/table.txt"
echo "curves: $OUT/curves.png, table: $OUT/table.txt"
exit $status
