#!/usr/bin/env bash
# Trains a small DeepSeek-V3 on the Python sources of this machine, in bf16 and in FP8-Flow, on a GPU or a CPU, and draws
# both loss curves. Fails if the losses differ by more than 1% at the end.
#
# STEPS, NGPU, CONFIG_FILE and OUT (the results' folder) may be set; arguments are torchtitan overrides for both runs.
set -euo pipefail
. "$(dirname "$0")/environment.sh" matplotlib tensorboard

OUT=${OUT:-outputs/quickstart}
STEPS=${STEPS:-200}
if ! python3 tools/build_corpus.py --out outputs/corpus; then
    echo "To build it anew: python3 tools/build_corpus.py --out outputs/corpus --force" >&2
    exit 2
fi

train() {  # name, overrides
    local name=$1
    shift
    echo "Training $name for $STEPS steps; the log is in $OUT/$name.log"
    rm -rf "${OUT:?}/$name"
    NGPU=${NGPU:-1} CONFIG_FILE=${CONFIG_FILE:-train_configs/debug.toml} ./tools/run_train.sh \
        --job.dump_folder "$OUT/$name" --training.steps "$STEPS" --metrics.log_freq 1 --metrics.enable_tensorboard \
        --metrics.disable_color_printing --debug.seed 0 "$@" 2>&1 | tee "$OUT/$name.log" |
        grep --line-buffered -E "FP8-Flow-MoE:|step: *[0-9]*[05]0 |Error" || {
        echo "$name failed; the end of its log:" >&2
        tail -n 30 "$OUT/$name.log" >&2
        exit 1
    }
}

mkdir -p "$OUT"
train bf16 --fp8_flow_moe.filter_fqns layers "$@"
train fp8_flow "$@"
python3 tools/compare_losses.py --run "bf16=$OUT/bf16" --run "fp8_flow=$OUT/fp8_flow" --tolerance 0.01 \
    --out "$OUT/curves.png" --json "$OUT/comparison.json"
