#!/usr/bin/env bash
# The convergence study on the GPUs of this machine:
#
#     bash experiments/convergence/run.sh branch           every recipe from bf16's checkpoints at 2/3 of the schedule
#     bash experiments/convergence/run.sh long             from scratch: bf16 twice and FP8-Flow, 151M tokens each
#     bash experiments/convergence/run.sh stress           what breaks it, 500 steps each
#     bash experiments/convergence/run.sh qwen3            as branch, 6 layers of Qwen3-30B-A3B: 3.8B parameters; about 20
#                                                          minutes of an H200, and 48 GB of disk for the checkpoint
#     bash experiments/convergence/run.sh clamped          as branch, routed experts with clamped_swiglu at limit 1
#
# None needs another. It writes records when all runs have ended; analyse.py does so at any time.
#
# OUT        folder of results.json (default: this script's)
# WORK       corpus, logs and checkpoints (default outputs/convergence)
# VARIANTS   names as in train.py; branch, clamped: added to what is there already, so that replicates can follow
# STEPS      of the learning-rate schedule
# STOP_AFTER steps to run of it
# GPUS       how many to spread over, those of CUDA_VISIBLE_DEVICES or the first; 0 trains on the CPU
# JOBS       runs at a time, the others wait (default 6 per GPU; 1 on the CPU, and 1 per GPU for qwen3)
# Arguments after STAGE go to train.py, torchtitan overrides included.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python3 -c "import torch, torchtitan, torchao, tokenizers" 2>/dev/null || . tools/environment.sh

STAGE=${1:-branch}
shift || true
OUT=${OUT:-experiments/convergence}
WORK=${WORK:-outputs/convergence}
RUNS=$WORK/$STAGE
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}
GPUS=${GPUS:-$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)}
PER_GPU=6
case $STAGE in
long)
    VARIANTS=${VARIANTS:-bf16-s1 balanced-s1 bf16-s1-again}
    STEPS=${STEPS:-4600} PER_GPU=3
    set -- --training.local_batch_size 32 --eval-every $((STEPS / 10)) "$@"
    ;;
branch) # bf16 and balanced four times per checkpoint, in the order of what is needed first
    VARIANTS=${VARIANTS:-bf16-s1-resume balanced-s1-resume bf16-s2-resume balanced-s2-resume
        bf16-s1-resume1 balanced-s1-resume1 bf16-s2-resume1 balanced-s2-resume1
        experts_only-s1-resume ffns_only-s1-resume experts_only-s2-resume ffns_only-s2-resume
        bf16-s1-resume2 balanced-s1-resume2 bf16-s2-resume2 balanced-s2-resume2
        bf16-s1-resume3 balanced-s1-resume3 bf16-s2-resume3 balanced-s2-resume3
        experts_only-s1-resume1 ffns_only-s1-resume1 experts_only-s2-resume1 ffns_only-s2-resume1}
    ;;
clamped) # bf16 and balanced three times per checkpoint, which have the clamp too
    VARIANTS=${VARIANTS:-bf16-s1-resume balanced-s1-resume bf16-s2-resume balanced-s2-resume
        bf16-s1-resume1 balanced-s1-resume1 bf16-s2-resume1 balanced-s2-resume1
        bf16-s1-resume2 balanced-s1-resume2 bf16-s2-resume2 balanced-s2-resume2}
    set -- --clamp 1 "$@"
    ;;
stress)
    VARIANTS=${VARIANTS:-bf16-s1-highlr balanced-s1-highlr bf16-s1-outliers balanced-s1-outliers
        bf16-s1-outliers1e5 balanced-s1-outliers1e5 bf16-s1-tiny balanced-s1-tiny
        bf16-s1-highlr-again bf16-s1-outliers-again bf16-s1-outliers1e5-again bf16-s1-tiny-again}
    STOP_AFTER=${STOP_AFTER:-500}
    ;;
qwen3)
    VARIANTS=${VARIANTS:-bf16-s1-resume balanced-s1-resume bf16-s1-resume1 balanced-s1-resume1
        bf16-s1-resume2 balanced-s1-resume2 bf16-s1-resume3 balanced-s1-resume3}
    STEPS=${STEPS:-750} PER_GPU=1
    set -- --model.name qwen3_convergence --model.flavor 30B-A3B_6_layers --training.seq_len 4096 \
        --training.local_batch_size 4 --optimizer.lr 3e-4 --eval-windows 256 "$@"
    ;;
*) echo "unknown stage $STAGE" >&2 && exit 2 ;;
esac
JOBS=${JOBS:-$((GPUS > 0 ? PER_GPU * GPUS : 1))}
export VARIANTS STEPS=${STEPS:-3000} STOP_AFTER=${STOP_AFTER:-} WORK RUNS GPUS JOBS CUDA_VISIBLE_DEVICES

export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=4

train() { # variant, then arguments for train.py; SLOT is its place among the runs at a time
    local name=$1
    shift
    rm -rf "${RUNS:?}/$name"
    mkdir -p "$RUNS/$name"
    [ "$GPUS" -gt 0 ] && export CUDA_VISIBLE_DEVICES=$(cut -d, -f $((SLOT % GPUS + 1)) <<<"$CUDA_VISIBLE_DEVICES")
    python3 -m experiments.convergence.train "$name" --work "$RUNS" --corpus "$WORK/corpus" \
        ${STOP_AFTER:+--stop-after "$STOP_AFTER"} --training.steps "$STEPS" "$@" >"$RUNS/$name/output.log" 2>&1 ||
        echo "$name ended with exit status $?: see $RUNS/$name/output.log"
}
export -f train

queue() { # runs the given variants, JOBS at a time
    xargs -r -n 1 | xargs -P "$JOBS" --process-slot-var=SLOT -I{} bash -c 'train {} "$@"' - "$@"
}

if [ ! -f "$WORK/corpus/validation.npy" ]; then
    python3 tools/build_corpus.py --out "$WORK/corpus" --packages all --vocab-size 8192 --max-bytes 110000000
    python3 -m experiments.convergence.data "$WORK/corpus"
fi
if [[ $STAGE =~ ^(branch|clamped|qwen3)$ ]]; then
    for seed in $(grep -oE 's[0-9]+-resume' <<<"$VARIANTS" | grep -oE '[0-9]+-' | tr -d - | sort -u); do
        [ -f "$RUNS/checkpoint-s$seed.pt" ] || echo "bf16-s$seed-trunk"
    done | queue --eval-every "$STEPS" "$@"
    set -- --eval-every $((STEPS / 6)) "$@"
fi
echo "$VARIANTS" | queue "$@"
python3 -m experiments.convergence.analyse "$RUNS" --out "$OUT"
