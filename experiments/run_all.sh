#!/usr/bin/env bash
# Measures the tables of the pages again on Hopper GPUs, then writes tables and picture and drops what no page cites:
#
#     bash experiments/run_all.sh --list            # parts: GPUs, seconds that each may take, whether it is done
#     bash experiments/run_all.sh                   # those of one GPU that are not done, in order
#     bash experiments/run_all.sh --gpus 4          # those of four GPUs
#     bash experiments/run_all.sh --limit 540       # begins none that may end later; call again to go on
#     bash experiments/run_all.sh --only layers_16b train_qwen3
#
# No part may take ten minutes. One that is done leaves outputs/run_all/PART.done; one that was cut off goes
# on at the next call. Remove that folder to begin again. Logs lie next to it, records in experiments/*/results.json.
# Parts named titan03 need torchtitan 0.3 in the environment, which excludes 0.2.2. The convergence study has a script
# of its own, convergence/pairs.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
done_in=outputs/run_all limit=1000000 list="" only="" gpus=1
while [ $# -gt 0 ]; do
    case $1 in
    --gpus) gpus=$2 && shift 2 ;;
    --limit) limit=$2 && shift 2 ;;
    --list) list=1 && shift ;;
    --only) shift && only="$* " && shift $# ;;
    *) sed -n '2,14p' "$0" >&2 && exit 2 ;;
    esac
done
[ -z "$list" ] && mkdir -p "$done_in"
titan03=$(python3 -c "import importlib.metadata as m; print(m.version('torchtitan'))" 2>/dev/null | grep -c '^0\.3' || true)

failed=0
part() { # name, GPUs (0: none), seconds, command
    local name=$1 needs=$2 seconds=$3 wants state="" log=$done_in/$1.log
    shift 3
    [ -n "$only" ] && [[ " $only" != *" $name "* ]] && return
    [ -e "$done_in/$name.done" ] && state=done
    [ -n "$list" ] && printf '%-28s %d GPUs %4d s  %s\n' "$name" "$needs" "$seconds" "$state" && return
    [ -n "$state" ] || { [ "$needs" != 0 ] && [ "$needs" != "$gpus" ]; } && return
    [[ $name == *titan03* ]] && wants=1 || wants=0
    [ "$needs" != 0 ] && [ "$wants" != "$titan03" ] && echo "$name: left out, needs the other torchtitan" && return
    [ $((SECONDS + seconds)) -gt "$limit" ] && echo "$name: left for the next call" && return
    echo "$name: $*"
    if ! timeout "$seconds" "$@" >"$log" 2>&1; then
        failed=1 && echo "$name: FAILED, see $log" && tail -n 3 "$log"
    elif grep -q "^out of time" "$log"; then
        failed=1 && echo "$name: cut off, see $log; call again to go on"
    else
        touch "$done_in/$name.done"
    fi
}

train() { # name, GPUs, seconds, arguments of train.py
    part "train_$1" "$2" "$3" python3 -m experiments.throughput.train --out experiments/throughput --gpus "$2" --seeds 0 \
        --budget 520 --steps 40 --timeout 240 "${@:4}"
}

layers() { # name, seconds, arguments of layer.py
    part "layers_$1" 1 "$2" python3 -m experiments.throughput.layer --out experiments/throughput --models "${@:3}"
}

kernels() { # module, seconds, arguments
    part "kernels_$1" 1 "$2" python3 -m "experiments.kernels.$1" "${@:3}" --out experiments/kernels/results.json
}

peer() { # module, seconds, what must import, arguments
    if [ -n "$list" ] || python3 -c "import $3" 2>/dev/null; then
        kernels "$1" "$2" "${@:4}"
    elif [ "$gpus" = 1 ] && [ -z "$only" ]; then
        echo "kernels_$1: $3 is not installed and left out; kernels/$1.py names its packages"
    fi
}

part corpus 0 60 python3 tools/build_corpus.py --out outputs/corpus

six=(--layers 6 --attention sdpa)
fused=(bf16_fused:checkpointing={saved,none,full})
train batch4 1 530 "${six[@]}" --seeds 0 1 --variants fp8_flow bf16 bf16_whole "${fused[0]}"
train batch4_fp8 1 500 "${six[@]}" --variants fp8_flow torchao torchao_whole naive_blockwise naive_whole
train batch4_checkpointing 1 500 "${six[@]}" --seeds 0 1 --variants fp8_flow fp8_flow:checkpointing=none "${fused[@]:0:2}"
train batch1 1 530 "${six[@]}" --local-batch 1 --seeds 0 1 --variants fp8_flow bf16 bf16_whole "${fused[0]}"
train flex 1 400 --layers 6 --attention flex --variants fp8_flow bf16 "${fused[0]}"
train settings 1 400 "${six[@]}" --variants fp8_flow fp8_flow:recompute=experts fp8_flow:save_h=fp8
train qwen3 1 530 --model qwen3_30b --layers 5 --attention sdpa --seeds 0 1 --variants fp8_flow bf16 bf16_whole "${fused[0]}"
train qwen3_checkpointing 1 500 --model qwen3_30b --layers 5 --attention sdpa --seeds 0 1 \
    --variants fp8_flow fp8_flow:checkpointing=none "${fused[@]:0:2}"
train qwen3_batch1 1 530 --model qwen3_30b --layers 5 --attention sdpa --local-batch 1 --seeds 0 1 \
    --variants fp8_flow bf16 bf16_whole "${fused[0]}"
part first_step 1 400 python3 -m experiments.throughput.first_step --out experiments/throughput --gpus 1 "${six[@]}"

layers 16b 400 16B --tokens 16384 8192
layers ablations 400 16B 671B --tokens 16384 --ablations
layers small 400 16B Qwen3-30B --tokens 4096
layers 671b 400 671B --tokens 16384 8192 4096
layers 16b_fp32 300 16B --tokens 16384 --fp32
layers kimi_glm 400 Kimi-K2 GLM-4.5-Air --tokens 16384 8192
layers qwen3 300 Qwen3-235B --tokens 16384 8192
layers qwen3_30b 300 Qwen3-30B --tokens 8192

kernels data_movement 400
kernels gemm 530 --budget 500
kernels routed_vs_fused_bf16 530 --budget 450
kernels model_layers 530 --budget 400
kernels grouped_ffn 300 --budget 200
kernels dense 300 --budget 200
kernels peaks 200 --budget 150
# Its autotuner compiles for ten minutes with an empty cache: after a timeout call the part again.
peer sonicmoe 530 sonicmoe --budget 450
peer transformer_engine 530 transformer_engine.pytorch --budget 300
for model in qwen3 deepseek_v3; do
    part "transformers_$model" 1 300 python3 -m experiments.transformers.run --out experiments/transformers --budget 200 \
        --models "$model"
    part "transformers_${model}_default" 1 100 python3 -m experiments.transformers.run --out experiments/transformers \
        --models "$model" --attention default --phases eager
done
for phase in loss host glm; do
    part "lora_$phase" 1 500 env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
        python3 -m experiments.lora_qwen3_30b.run --out experiments/lora_qwen3_30b --phases "$phase"
done
part numerics 1 200 python3 -m experiments.numerics.layer --out experiments/numerics
part double_quantization 0 60 python3 -m experiments.numerics.double_quantization --out experiments/numerics

dense=(--variants bf16 float8_tensorwise float8_rowwise fp8_flow fp8_flow:linear_fqns=attention. -- --activation_checkpoint.mode=none)
train llama3_1b 1 530 --model llama3_1b "${dense[@]}"
train llama3_8b 1 530 --model llama3_8b --layers 8 "${dense[@]}"

both=(fp8_flow:dispatch=symmetric fp8_flow:dispatch=all_to_all bf16)
train 2gpus 2 530 --layers 8 --attention sdpa --variants fp8_flow "${both[@]:0:2}"
# Whole models, three runs each. dispatch = "auto" changes its way after 20 steps, or later where it waits for the routing.
strongest=bf16_fused:checkpointing=saved,ep=1
whole=(--attention sdpa --steps 30 --seeds 0 1 2)
train 16b_default 4 590 --attention sdpa --steps 60 --seeds 0 1 --variants fp8_flow "${both[0]}"
never=(-- --parallelism.fsdp_reshard_after_forward=never) # both sides gain; the strongest bf16 then takes 133 GiB
train 16b_14_layers 2 590 --layers 14 --attention sdpa --variants fp8_flow "${both[0]}" "${both[0]},checkpointing=none" \
    "$strongest" bf16_fused:checkpointing=none,ep=1 "${never[@]}"
train 16b_14_own_routing 2 590 --layers 14 --attention sdpa --steps 80 --routing model --variants fp8_flow "$strongest" "${never[@]}"
train 16b_6_layers 2 400 "${six[@]}" --variants "${both[0]}" "$strongest" bf16 naive_blockwise
train qwen3_16_layers 2 590 --model qwen3_30b --layers 16 --attention sdpa --variants "${both[0]}" "${both[0]},recompute=experts" \
    bf16_fused:ep=1 bf16_fused:checkpointing=full,ep=1
train 16b 4 590 "${whole[@]}" --variants "${both[0]}" "$strongest" "${never[@]}"
train 16b_batch1 4 590 "${whole[@]}" --local-batch 1 --variants "${both[0]}" "$strongest" bf16
train 16b_batch8 4 590 "${whole[@]}" --local-batch 8 --variants "${both[0]},recompute=experts" "$strongest" bf16
train qwen3_30b 4 590 --model qwen3_30b "${whole[@]}" --variants "${both[0]},recompute=experts" "$strongest" bf16
train 16b_microbatches 4 590 --attention sdpa --steps 20 --variants "${both[0]},cache_weights=true" "$strongest" \
    -- --training.global_batch_size=64
train 16b_own_routing 4 590 --attention sdpa --steps 60 --routing model --variants fp8_flow "$strongest" "${never[@]}"
part exchange 4 540 python3 -m experiments.expert_parallel.exchange --out experiments/expert_parallel/results.json

titan03() { # name, GPUs, arguments of train.py
    train "titan03_$1" "$2" 530 --torchtitan 0.3.0 "${@:3}"
}
titan03 batch4 1 --layers 6 --variants fp8_flow bf16 bf16_strongest
titan03 fp8 1 --layers 6 --variants fp8_flow torchao bf16_outside_fsdp
titan03 batch1 1 --layers 6 --local-batch 1 --cuda-graphs --variants fp8_flow fp8_flow:cache_weights=true bf16 bf16_outside_fsdp
titan03 qwen3 1 --model qwen3_30b --layers 5 --variants fp8_flow bf16 bf16_outside_fsdp
titan03 symmetric 2 --layers 8 --variants fp8_flow:dispatch=symmetric bf16
titan03 fsdp 2 --layers 8 --variants fp8_flow bf16 -- --parallelism.expert_parallel_degree=1
titan03 tp 2 --layers 8 --variants fp8_flow:dispatch=all_to_all bf16 -- --parallelism.tensor_parallel_degree=2
titan03 16b 4 --steps 30 --variants fp8_flow:dispatch=symmetric bf16 bf16_strongest

part pages 0 60 bash -ec 'python3 -m experiments.headline
    python3 -m experiments.tables --prune'
rm -f "$done_in/pages.done" # what the next call measures belongs on them too
exit $failed
