#!/usr/bin/env bash
# Trains a DeepSeek-V3 in bf16, again in bf16 with one bit of one initial weight changed, and in FP8. Draws the losses, and
# fails if FP8's mean loss of the last quarter differs from bf16's by more than 1%. The second run is the yardstick: how
# far rounding alone takes bf16 from itself.
#
# On a Hopper GPU the model has four of the 16B model's layers, 100 steps and torch.compile. On a CPU it has 6M parameters
# and 96 steps, and FP8 is emulated: four minutes on two cores. A CPU that is slow in bf16 computes in float32 instead.
#
# With --torchtitan03 as the first argument torchtitan 0.3 trains, in an environment of its own: the same four layers, or
# on a CPU its debug model for 16 steps.
#
# STEPS, NGPU, CONFIG_FILE (for 0.3 the name of a config function) and OUT (the results' folder) may be set; arguments are
# torchtitan overrides for all runs.
set -euo pipefail
torchtitan=0.2.2 results=outputs/quickstart
if [ "${1-}" = --torchtitan03 ]; then
    shift
    torchtitan=0.3.0 results=outputs/quickstart03
fi
case ${1-} in -h | --help) sed -n '2,14p' "$0" && exit ;; esac
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
cd "$(dirname "$0")/.."
if [ $torchtitan = 0.2.2 ] && [ -n "${CONFIG_FILE-}" ] && [ ! -f "$CONFIG_FILE" ]; then
    refuse "CONFIG_FILE = $CONFIG_FILE: no such file; train_configs/ has some"
fi
OUT=${OUT:-$results} NGPU=${NGPU:-1}
echo "This trains three times, four minutes in all on two CPU cores. The first time it also installs .venv, which takes"
echo "2.7 GB, with CUDA 7 GB. It writes $OUT, and outputs/corpus of 20 MB."
. tools/environment.sh matplotlib tensorboard
mkdir -p "$OUT"
python3 -c "
import torch
from titan_fp8moe.trainer.cpu import has_fast_bf16
gpu = torch.cuda.is_available()
device = 'cpu' if not gpu else 'hopper' if torch.cuda.get_device_capability()[0] == 9 else torch.cuda.get_device_name()
print('bf16' if gpu or has_fast_bf16() else 'float32', device)
" 2>&1 >"$OUT/device.txt" | alive "looking for a GPU"
read -r baseline device <"$OUT/device.txt"
case $torchtitan-$device in
0.2.2-hopper) default=train_configs/deepseek_v3_16b_short.toml steps=100 ;;
0.2.2-cpu) default=train_configs/debug.toml steps=96 ;;
0.3.0-hopper) default=deepseek_v3_16b_short steps=100 ;;
0.3.0-cpu) default=deepseek_v3_debugmodel steps=16 ;;
*) refuse "the quickstart has settings for Hopper GPUs and CPUs, not for $device; CUDA_VISIBLE_DEVICES= $0 trains on the CPU" ;;
esac
CONFIG_FILE=${CONFIG_FILE:-$default}
STEPS=${STEPS:-$steps}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}  # this and the threads as run_train.sh does
if [ "$device" = cpu ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    note="A CPU emulates FP8: compare losses. Its speed and its memory mean nothing."
    echo "$note"
fi

if [ $torchtitan = 0.2.2 ]; then
    check="torchtitan.dry_run $CONFIG_FILE" settings="--job.config_file $CONFIG_FILE" dump=--job.dump_folder
else
    data="--hf_assets_path outputs/corpus/tokenizer --dataloader.dataset c4_test --dataloader.dataset_path outputs/corpus/train"
    settings="--config $CONFIG_FILE $data"
    if [ "$device" = cpu ]; then
        settings+=" --training.seq_len 256 --training.local_batch_size 4"
        settings+=" --lr_scheduler.warmup_steps $STEPS"  # after a shorter warm-up both losses jump, and part
    fi
    check="torchtitan03.dry_run $settings" dump=--dump_folder
    settings="--module titan_fp8moe.torchtitan03 $settings"
fi

if [ ! -f outputs/corpus/corpus.json ] && ! python3 tools/build_corpus.py --out outputs/corpus 2>&1 | alive corpus; then
    echo "To build it anew: rm -r outputs/corpus; of your own texts: python3 tools/build_corpus.py --out outputs/corpus --input DIR" >&2
    exit 2
fi
echo "Checking $CONFIG_FILE"
if ! python3 tools/launch.py python3 -m titan_fp8moe.$check --world-size "$NGPU" "$@" 2>&1 >"$OUT/dry_run.txt" | alive "dry run"; then
    tail -n 1 "$OUT/dry_run.txt" >&2
    exit 2
fi

train() {  # name, module, overrides
    echo "Training $1 for $STEPS steps; the log is $OUT/$1.log"
    rm -rf "${OUT:?}/$1"
    python3 tools/launch.py torchrun --standalone --nproc_per_node="$NGPU" --local-ranks-filter=0 --role=rank --tee=3 \
        -m "$2" $settings $dump "$OUT/$1" --training.steps "$STEPS" --metrics.log_freq 1 \
        --metrics.enable_tensorboard --metrics.disable_color_printing --debug.seed 0 "${@:3}" 2>&1 |
        tee "$OUT/$1.log" | python3 tools/progress.py "$1" "$STEPS" || {
        echo "$1 failed: $(tail -n 1 "$OUT/$1.log"); the log is $OUT/$1.log" >&2
        exit 1
    }
}

train "$baseline" torchtitan.train --fp8_flow_moe.filter_fqns layers "$@"
train "${baseline}_bit" tools.one_bit --fp8_flow_moe.filter_fqns layers "$@"
train fp8_flow torchtitan.train "$@"
status=0 runs=()
for name in "$baseline" "${baseline}_bit" fp8_flow; do runs+=(--run "$name=$OUT/$name"); done
rm -f "$OUT/curves.png"
python3 tools/compare_losses.py "${runs[@]}" --smooth $(((STEPS + 3) / 4)) --tolerance 0.01 --out "$OUT/curves.png" \
    2>&1 >"$OUT/table.txt" | alive "drawing the curves" || status=$?
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
