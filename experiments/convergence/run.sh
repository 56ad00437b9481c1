#!/usr/bin/env bash
# The convergence study on the GPUs of this machine, all variants side by side:
#
#     bash experiments/convergence/run.sh                  corpus, training, table and pictures
#     bash experiments/convergence/run.sh branch           after it: every recipe from bf16's checkpoint at 2/3 of the run
#     bash experiments/convergence/run.sh stress           after it: what breaks it, 500 steps each
#
# or in parts: `start` returns at once (`branch-start`, `stress-start`), `status` prints a line per run, `wait` waits for
# them, `collect` analyses and packs what is there at any time, `stop` ends the runs.
#
# OUT        where results go (default experiments/convergence/results)
# WORK       corpus, raw logs and checkpoint (default outputs/convergence)
# VARIANTS   names as in train.py
# STEPS      of the learning-rate schedule
# STOP_AFTER steps to run of it
# GPUS       how many to spread over; 0 trains on the CPU
# LIMIT_S    how long to wait; the runs go on after it
# Arguments after the command go to train.py, torchtitan overrides included.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python3 -c "import torch, torchtitan, torchao, tokenizers, matplotlib" 2>/dev/null || . tools/environment.sh

COMMAND=${1:-all}
shift || true
WORK=${WORK:-outputs/convergence}
OUT=${OUT:-experiments/convergence/results}
STEPS=${STEPS:-3000}
GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}
LIMIT_S=${LIMIT_S:-86400}
MAIN="bf16-s1 bf16-s2 balanced-s1 balanced-s2 scaling_aware-s1 requantize-s1 rowwise-s1 naive-s1 bf16-s1-perturbed"
STRESS="bf16-s1-highlr balanced-s1-highlr bf16-s1-outliers balanced-s1-outliers bf16-s1-outliers1e5 balanced-s1-outliers1e5
    bf16-s1-tiny balanced-s1-tiny"
BRANCH="bf16-s1-resume bf16-s1-resumeperturbed balanced-s1-resume scaling_aware-s1-resume requantize-s1-resume
    rowwise-s1-resume naive-s1-resume"

corpus() {
    [ -f "$WORK/corpus/validation.npy" ] && return
    timeout 600 python3 tools/build_corpus.py --out "$WORK/corpus" --packages all --vocab-size 8192 --max-bytes 110000000
    timeout 600 python3 -m experiments.convergence.data "$WORK/corpus"
}

start() { # variants, then arguments for train.py
    local variants=$1 index=0 name
    shift
    corpus
    export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=4
    for name in $variants; do
        rm -rf "${WORK:?}/$name"
        mkdir -p "$WORK/$name"
        [ "$GPUS" -gt 0 ] && export CUDA_VISIBLE_DEVICES=$((index % GPUS))
        setsid nohup python3 -m experiments.convergence.train "$name" --work "$WORK" --corpus "$WORK/corpus" \
            --checkpoint-at "$([ "$name" = bf16-s1 ] && echo $((STEPS * 2 / 3)) || echo -1)" \
            ${STOP_AFTER:+--stop-after "$STOP_AFTER"} --training.steps "$STEPS" "$@" \
            >"$WORK/$name/output.log" 2>&1 </dev/null &
        echo $! >"$WORK/$name/pid"
        index=$((index + 1))
    done
}

running() {
    local file
    for file in "$WORK"/*/pid; do
        kill -0 "$(cat "$file")" 2>/dev/null && basename "$(dirname "$file")"
    done || true
}

wait_for_runs() {
    local end=$((SECONDS + LIMIT_S)) report=0
    while [ -n "$(running)" ] && [ $SECONDS -lt $end ]; do
        if [ $SECONDS -ge $report ]; then
            echo "--- ${SECONDS} s, running: $(running | tr '\n' ' ')"
            status
            report=$((SECONDS + 60))
        fi
        sleep 2
    done
}

status() {
    python3 -m experiments.convergence.analyse "$WORK" --status
    grep -sE "starting again with|^[A-Za-z.]*Error|captured:" "$WORK"/*/output.log | sed "s|^$WORK/||" | cut -c1-220 || true
}

collect() {
    mkdir -p "$OUT"
    status
    python3 -m experiments.convergence.analyse "$WORK" --out "$OUT"
    tar czf "$OUT/logs.tar.gz" -C "$WORK" --exclude='*.npy' --exclude='*.pt' --exclude='*.partial' --exclude='corpus' .
    cp "$WORK/corpus/corpus.json" "$OUT/"
    (cd "$WORK" && tar czf - ./*/choices.*.npy) >"$OUT/choices.tar.gz"
    ls -l "$OUT"
}

case $COMMAND in
all | start) start "${VARIANTS:-$MAIN}" "$@" ;;&
stress | stress-start) STOP_AFTER=${STOP_AFTER:-500} start "${VARIANTS:-$STRESS}" "$@" ;;&
branch | branch-start) start "${VARIANTS:-$BRANCH}" "$@" ;;&
all | branch | stress | wait) wait_for_runs ;;&
all | branch | stress | collect) collect ;;
status) status ;;
stop) for name in $(running); do kill "$(cat "$WORK/$name/pid")"; done ;;
start | branch-start | stress-start | wait) ;;
*) echo "unknown command $COMMAND" >&2 && exit 2 ;;
esac
