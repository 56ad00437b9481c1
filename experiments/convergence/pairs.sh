#!/usr/bin/env bash
# Pairs of runs, FP8 and the strongest bf16, on the GPUs of this machine:
#
#     bash experiments/convergence/pairs.sh start 1 2 3 4   # the pairs of these seeds, one run per GPU at a time
#     bash experiments/convergence/pairs.sh collect [FILE]  # prints how far they are; writes the logs to WORK/pairs.json or FILE
#     bash experiments/convergence/pairs.sh stop            # ends the runs that `start` began
#
# `start` returns at once. Runs stay in a session of their own and write below WORK. On a GPU the next run imports its
# modules while one trains. The first seed's bf16 run also measures gradient noise.
#
# CORPUS  folder of corpus.sh's train.npy and validation.npy (default outputs/corpus60)
# WORK    logs (default outputs/pairs)
# GPUS    indices, separated by blanks (default: all)
# FLAGS   for pair.py, torchtitan overrides included
# NOISE   flags of the run that measures gradient noise
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export CORPUS=${CORPUS:-outputs/corpus60} WORK=${WORK:-outputs/pairs} FLAGS=${FLAGS:-}
export NOISE=${NOISE---noise-after 0.25 0.5 1}
export PYTORCH_ALLOC_CONF=expandable_segments:True PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/outputs/cache/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/outputs/cache/triton} # all runs share both

queue() { # GPU, runs in order
    local names=("${@:2}") pids=() i flags
    launch() { # imports, then waits for its gate; of what follows, its output tells
        flags=$FLAGS
        [ "${names[$1]}" = "bf16-s$FIRST" ] && flags="$NOISE $FLAGS"
        mkdir -p "$WORK/${names[$1]}"
        rm -f "$WORK/${names[$1]}/gate"
        # shellcheck disable=SC2086
        CUDA_VISIBLE_DEVICES=$gpu THROUGHPUT_GATE=$WORK/${names[$1]}/gate python3 -m experiments.convergence.pair \
            "${names[$1]}" --work "$WORK" --corpus "$CORPUS" $flags >"$WORK/${names[$1]}/output.log" 2>&1 &
        pids[$1]=$!
    }
    local gpu=$1
    launch 0
    for i in "${!names[@]}"; do
        touch "$WORK/${names[$i]}/gate"
        [ $((i + 1)) -lt ${#names[@]} ] && launch $((i + 1))
        wait "${pids[$i]}" || echo "${names[$i]} ended with exit status $?: see $WORK/${names[$i]}/output.log"
    done
}
export -f queue

case ${1:-} in
start)
    shift
    export FIRST=$1
    read -ra gpus <<<"${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd' ')}"
    mkdir -p "$WORK"
    for index in "${!gpus[@]}"; do
        order=() turn=$index
        for seed in "${@:index+1}"; do # every n-th, each time in the other order
            if [ $((turn++ % ${#gpus[@]})) = "$index" ]; then
                [ $(((index + ${#order[@]} / 2) % 2)) = 0 ] && order+=("fp8-s$seed" "bf16-s$seed") || order+=("bf16-s$seed" "fp8-s$seed")
            fi
        done
        [ ${#order[@]} = 0 ] && continue
        echo "GPU ${gpus[$index]}: ${order[*]}"
        setsid nohup bash -c 'queue "$@"' queue "${gpus[$index]}" "${order[@]}" >"$WORK/queue-$index.log" 2>&1 </dev/null &
        echo $! >"$WORK/queue-$index.pid"
    done
    ;;
collect)
    tail -qn 2 "$WORK"/queue-*.log
    python3 -m experiments.convergence.compare "$WORK" --save "${2:-$WORK/pairs.json}"
    ;;
stop)
    for file in "$WORK"/queue-*.pid; do
        kill -- "-$(cat "$file")" && rm "$file"
    done
    ;;
*) sed -n '2,18p' "$0" >&2 && exit 2 ;;
esac
