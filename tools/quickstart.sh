#!/usr/bin/env bash
# Trains a DeepSeek-V3 in bf16 and in FP8 on the Python sources of this machine, draws both loss curves and compares
# losses, tokens/s and memory. On a Hopper GPU the model has four of the 16B model's layers, 100 steps and torch.compile;
# on a CPU it has 6M parameters and 140 steps, and FP8 is emulated. That takes four minutes on two cores. Fails if the losses
# differ by more than 1% at the end. On a CPU that is slow in bf16, the other computations are in float32.
#
# With --torchtitan03 as the first argument torchtitan 0.3 trains, in an environment of its own: the same four layers, or
# on a CPU its debug model for 20 steps.
#
# STEPS, NGPU, CONFIG_FILE (for 0.3 the name of a config function) and OUT (the results' folder) may be set; arguments are
# torchtitan overrides for both runs.
set -euo pipefail
torchtitan=0.2.2 results=outputs/quickstart
if [ "${1-}" = --torchtitan03 ]; then
    shift
    torchtitan=0.3.0 results=outputs/quickstart03
fi
case ${1-} in -h | --help) sed -n '2,11p' "$0" && exit ;; esac
refuse() {  # message
    echo "error: $1" >&2
    exit 2
}
no_option() { refuse "$1 is no option; known are --torchtitan03, as the first, --help and overrides such as --training.seq_len 512"; }
case ${1---} in -*) ;; *) no_option "$1" ;; esac
for argument in "$@"; do
    case $argument in
    --*[._]*) ;;  # torchtitan's settings have tables, or names of several words
    -[!0-9.]*) no_option "$argument" ;;
    esac
done
for name in STEPS NGPU; do
    [[ ${!name:-1} =~ ^[1-9][0-9]*$ ]] || refuse "$name = ${!name}; set it to a whole number from 1"
done
. "$(dirname "$0")/environment.sh" matplotlib tensorboard

if [ $torchtitan = 0.2.2 ] && [ -n "${CONFIG_FILE-}" ] && [ ! -f "$CONFIG_FILE" ]; then
    refuse "CONFIG_FILE = $CONFIG_FILE: no such file; train_configs/ has some"
fi
export NGPU=${NGPU:-1}
OUT=${OUT:-$results}
mkdir -p "$OUT"
python3 -c "
import torch
gpu = torch.cuda.is_available()
print('cpu' if not gpu else 'hopper' if torch.cuda.get_device_capability()[0] == 9 else torch.cuda.get_device_name())
" 2>&1 >"$OUT/device.txt" | alive "looking for a GPU"
device=$(<"$OUT/device.txt")
case $torchtitan-$device in
0.2.2-hopper) default=train_configs/deepseek_v3_16b_short.toml steps=100 ;;
0.2.2-cpu) default=train_configs/debug.toml steps=140 ;;
0.3.0-hopper) default=deepseek_v3_16b_short steps=100 ;;
0.3.0-cpu) default=deepseek_v3_debugmodel steps=20 ;;
*) refuse "the quickstart has settings for Hopper GPUs and CPUs, not for $device; CUDA_VISIBLE_DEVICES= $0 trains on the CPU" ;;
esac
export CONFIG_FILE=${CONFIG_FILE:-$default}
STEPS=${STEPS:-$steps}
baseline=bf16
if [ "$device" = cpu ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # as run_train.sh does
    baseline=baseline  # the precision depends on the CPU, and the log says it
    note="A CPU emulates FP8: compare losses. Its speed and its memory mean nothing."
    echo "$note"
fi

if [ $torchtitan = 0.2.2 ]; then
    check() { python3 tools/launch.py python3 -m titan_fp8moe.torchtitan.dry_run "$CONFIG_FILE" "$@"; }
    run() { ./tools/run_train.sh --job.dump_folder "$@"; }
else
    data="--hf_assets_path outputs/corpus/tokenizer --dataloader.dataset c4_test --dataloader.dataset_path outputs/corpus/train"
    settings="--config $CONFIG_FILE $data"
    if [ "$device" = cpu ]; then
        settings+=" --training.seq_len 256 --training.local_batch_size 4"
        settings+=" --lr_scheduler.warmup_steps $STEPS"  # after a shorter warm-up both losses jump, and part
    fi
    check() { python3 tools/launch.py python3 -m titan_fp8moe.torchtitan03.dry_run $settings "$@"; }
    run() {
        python3 tools/launch.py torchrun --standalone --nproc_per_node="$NGPU" --local-ranks-filter=0 --role=rank --tee=3 \
            -m torchtitan.train --module titan_fp8moe.torchtitan03 $settings --dump_folder "$@"
    }
fi

if [ ! -f outputs/corpus/corpus.json ] && ! python3 tools/build_corpus.py --out outputs/corpus 2>&1 | alive corpus; then
    echo "To build it anew: rm -r outputs/corpus; of your own texts: python3 tools/build_corpus.py --out outputs/corpus --input DIR" >&2
    exit 2
fi
echo "Checking $CONFIG_FILE"
if ! check --world-size "$NGPU" "$@" 2>&1 >"$OUT/dry_run.txt" | alive "dry run"; then
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
        echo "$name failed: $(tail -n 1 "$OUT/$name.log"); the log is $OUT/$name.log" >&2
        exit 1
    }
}

train "$baseline" --fp8_flow_moe.filter_fqns layers "$@"
train fp8_flow "$@"
status=0
rm -f "$OUT/curves.png"
python3 tools/compare_losses.py --run "$baseline=$OUT/$baseline" --run "fp8_flow=$OUT/fp8_flow" --tolerance 0.01 \
    --out "$OUT/curves.png" 2>&1 >"$OUT/table.txt" | alive "drawing the curves" || status=$?
cat "$OUT/table.txt"
[ "$device" = cpu ] && echo "$note"
[ -e "$OUT/curves.png" ] && echo "curves: $OUT/curves.png"
echo "table: $OUT/table.txt"
echo "next, in $(command -v python3):"
[ -n "${VIRTUAL_ENV-}" ] && echo "  source $VIRTUAL_ENV/bin/activate   # once per shell"
echo "  python3 -m titan_fp8moe.doctor   # what works on this machine"
if [ $torchtitan = 0.2.2 ]; then
    echo "  cp $CONFIG_FILE my_run.toml   # then edit it: docs/configuration.md, docs/how-to.md"
    echo "  python3 -m titan_fp8moe.torchtitan.dry_run my_run.toml   # checks it, without a GPU"
    echo "  CONFIG_FILE=my_run.toml ./tools/run_train.sh"
else
    echo "  examples/torchtitan03_config.py has a config of your own; this checks it, without a GPU:"
    echo "  python3 -m titan_fp8moe.torchtitan03.dry_run --module examples.torchtitan03_config --config my_run"
fi
exit $status
