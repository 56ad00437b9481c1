#!/usr/bin/env bash
# Trains a DeepSeek-V3 in bf16 and in FP8 on the Python sources of this machine, draws both loss curves and compares
# losses, tokens/s and memory. On a Hopper GPU the model has four of the 16B model's layers, 100 steps and torch.compile;
# on a CPU it has 6M parameters and 200 steps. Either takes about four minutes. Fails if the losses differ by more than 1%
# at the end.
#
# STEPS, NGPU, CONFIG_FILE and OUT (the results' folder) may be set; arguments are torchtitan overrides for both runs.
set -euo pipefail
. "$(dirname "$0")/environment.sh" matplotlib tensorboard

export NGPU=${NGPU:-1}
OUT=${OUT:-outputs/quickstart}
device=$(python3 -c "
import torch
gpu = torch.cuda.is_available()
print('cpu' if not gpu else 'hopper' if torch.cuda.get_device_capability()[0] == 9 else torch.cuda.get_device_name())")
case $device in
hopper) default=train_configs/deepseek_v3_16b_short.toml steps=100 ;;
cpu) default=train_configs/debug.toml steps=200 ;;
*)
    echo "The FP8 kernels need a Hopper GPU, not $device: CUDA_VISIBLE_DEVICES= $0 trains on the CPU." >&2
    exit 2
    ;;
esac
export CONFIG_FILE=${CONFIG_FILE:-$default}
STEPS=${STEPS:-$steps}

if ! python3 tools/build_corpus.py --out outputs/corpus; then
    echo "To build it anew: python3 tools/build_corpus.py --out outputs/corpus --force" >&2
    exit 2
fi
mkdir -p "$OUT"
echo "Checking $CONFIG_FILE"
if ! python3 tools/launch.py python3 -m titan_fp8moe.torchtitan.dry_run "$CONFIG_FILE" --world-size "$NGPU" "$@" \
    >"$OUT/dry_run.txt"; then
    tail -n 1 "$OUT/dry_run.txt" >&2
    exit 2
fi

train() {  # name, overrides
    local name=$1
    shift
    echo "Training $name for $STEPS steps; the log is $OUT/$name.log"
    rm -rf "${OUT:?}/$name"
    ./tools/run_train.sh --job.dump_folder "$OUT/$name" --training.steps "$STEPS" --metrics.log_freq 1 \
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
