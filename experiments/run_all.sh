#!/usr/bin/env bash
# Measures every table of the experiments again on one Hopper GPU, draws their pictures and writes the tables of the pages.
# No part may take more than nine minutes:
#
#     bash experiments/run_all.sh                   # the parts that are not done, in order
#     bash experiments/run_all.sh --limit 540       # begins none that may end later; call again to go on
#     bash experiments/run_all.sh --only layers_16b train_qwen3
#     bash experiments/run_all.sh --list            # parts, the seconds each may take, and whether it is done
#     bash experiments/run_all.sh --deepgemm DIR    # with DeepGEMM's compiled kernels, see kernels/deepgemm.py
#     bash experiments/run_all.sh --gpus 8          # instead, what takes all GPUs of a node, in the order of its worth
#
# A part that is done leaves outputs/run_all/PART.done; remove that folder to begin again. Logs lie next to it. Records go
# to experiments/*/results.json. The convergence study has a script of its own, convergence/run.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
done_in=outputs/run_all deepgemm="" limit=1000000 list="" only="" gpus=1
while [ $# -gt 0 ]; do
    case $1 in
    --deepgemm) deepgemm=$(realpath "$2") && shift 2 ;;
    --gpus) gpus=$2 && shift 2 ;;
    --limit) limit=$2 && shift 2 ;;
    --list) list=1 && shift ;;
    --only) shift && only="$* " && shift $# ;;
    *) sed -n '2,12p' "$0" >&2 && exit 2 ;;
    esac
done

failed=0
part() { # name, seconds, command
    local name=$1 seconds=$2 state=""
    shift 2
    [ -n "$only" ] && [[ " $only" != *" $name "* ]] && return
    [ -e "$done_in/$name.done" ] && state=done
    [ -n "$list" ] && printf '%-24s %4d s  %s\n' "$name" "$seconds" "$state" && return
    [ -n "$state" ] && return
    [ $((SECONDS + seconds)) -gt "$limit" ] && echo "$name: left for the next call" && return
    echo "$name: $*"
    if timeout "$seconds" "$@" >"$done_in/$name.log" 2>&1; then
        touch "$done_in/$name.done"
    else
        failed=1 && echo "$name: FAILED, see $done_in/$name.log" && tail -n 3 "$done_in/$name.log"
    fi
}

train() { # name, seconds, arguments of train.py
    part "train_$1" "$2" python3 -m experiments.throughput.train --out experiments/throughput --gpus 1 --seeds 0 --budget 520 \
        --steps 40 --timeout 170 "${@:3}"
}

layers() { # name, seconds, arguments of layer.py
    part "layers_$1" "$2" python3 -m experiments.throughput.layer --out experiments/throughput \
        --variants bf16 "bf16 whole" "bf16 fused" "bf16 fp32 bmm" fp8 "fp8 with weight quantization" \
        "fp8 with weights kept for 4 microbatches" --models "${@:3}"
}

kernels() { # module, seconds, arguments
    part "kernels_$1" "$2" python3 -m "experiments.kernels.$1" "${@:3}" --out experiments/kernels/results.json
}

mkdir -p "$done_in"
part corpus 60 python3 tools/build_corpus.py --out outputs/corpus --max-bytes 60000000

if [ "$gpus" -gt 1 ]; then
    node() { # name, seconds, arguments of train.py
        part "node${gpus}_$1" "$2" python3 -m experiments.throughput.train --out experiments/throughput --gpus "$gpus" --seeds 0 \
            --budget 520 --steps 30 --timeout 240 "${@:3}"
    }
    both=(fp8_flow:dispatch=symmetric fp8_flow:dispatch=all_to_all bf16)
    node 16b 530 --variants "${both[@]}"
    part "node${gpus}_exchange" 530 python3 -m experiments.expert_parallel.exchange --out experiments/expert_parallel/results.json
    part "node${gpus}_tests" 530 python3 -m pytest tests/distributed -q -p no:cacheprovider
    part "node${gpus}_layer_671b" 530 python3 -m experiments.throughput.layer --out experiments/throughput --gpus "$gpus" \
        --models 671B --experts $((256 / gpus)) --tokens 4096
    node 16b_batch1 530 --local-batch 1 --variants "${both[@]}"
    if [ -n "$list" ] || python3 -c "import liger_cute_kernels" 2>/dev/null; then
        part "node${gpus}_liger_cute" 300 torchrun --nproc-per-node "$gpus" --no-python \
            python3 -m experiments.kernels.liger_cute --out experiments/kernels/results.json
    else
        echo "LigerCute is not installed and left out; kernels/liger_cute.py names its packages and what to preload"
    fi
    # With torchtitan 0.3 in the environment, which excludes 0.2.2.
    node 16b_titan03 530 --torchtitan 0.3.0 --variants fp8_flow:dispatch=symmetric bf16
    exit $failed
fi

six=(--layers 6 --attention sdpa)
fused=(bf16_fused:checkpointing={saved,none,full})
train batch4 530 "${six[@]}" --seeds 0 1 --variants fp8_flow bf16 bf16_whole "${fused[0]}"
train batch4_fp8 500 "${six[@]}" --variants fp8_flow torchao torchao_whole naive_blockwise naive_whole
train batch4_checkpointing 500 "${six[@]}" --variants fp8_flow fp8_flow:checkpointing=none bf16:checkpointing=saved "${fused[@]}"
train batch1 530 "${six[@]}" --local-batch 1 --seeds 0 1 --variants fp8_flow bf16 bf16_whole "${fused[0]}"
train flex 400 --layers 6 --attention flex --variants fp8_flow bf16 bf16_whole
train settings 400 "${six[@]}" --variants fp8_flow fp8_flow:recompute=experts fp8_flow:save_h=fp8
train ablations 400 "${six[@]}" --variants fp8_flow requantize unfused_permute
train forced 300 "${six[@]}" --routing forced --variants fp8_flow bf16 bf16_whole
train model 300 "${six[@]}" --routing model --variants fp8_flow bf16 bf16_whole
train full_checkpoints 300 "${six[@]}" --variants fp8_flow bf16 -- --activation_checkpoint.mode=full
train qwen3 530 --model qwen3_30b --layers 5 --seeds 0 1 --variants fp8_flow bf16 bf16_whole "${fused[0]}"
train qwen3_batch1 530 --model qwen3_30b --layers 5 --local-batch 1 --seeds 0 1 --variants fp8_flow bf16_whole "${fused[0]}"
# A part of the sweep at a time: remove its .done until the log ends with "complete".
part sweep 530 python3 -m experiments.throughput.sweep --out experiments/throughput "${six[@]}" --budget 420 --timeout 100
part sweep_qwen3 530 python3 -m experiments.throughput.sweep --out experiments/throughput --model qwen3_30b --layers 5 \
    --budget 420 --timeout 100
part first_step 400 python3 -m experiments.throughput.first_step --out experiments/throughput --gpus 1 "${six[@]}"
part profile 300 python3 -m experiments.throughput.profile_step --out experiments/throughput --gpus 1 "${six[@]}" \
    --timeout 170

layers 16b 400 16B --tokens 16384 8192 # 4096: layers_small
part layers_ablations 400 python3 -m experiments.throughput.layer --out experiments/throughput \
    --models 16B 671B --experts 64 --tokens 16384 --variants fp8 "fp8 requantize" "fp8 unfused permute" \
    "fp8 with bf16 shared experts"
part layers_small 300 python3 -m experiments.throughput.layer --out experiments/throughput \
    --models 16B --tokens 4096 --processes 5 --together 5
layers 671b 400 671B --experts 64 --tokens 16384 8192 4096
layers 16b_fp32 300 16B --tokens 16384 --fp32
layers 671b_few_experts 400 671B --experts 8 32 --tokens 16384
layers kimi_glm 400 Kimi-K2 GLM-4.5-Air --tokens 16384 8192 4096
layers qwen3 400 Qwen3-235B Qwen3-30B --tokens 16384 8192 4096
layers v2 300 DeepSeek-V2 --tokens 16384 8192 4096

kernels data_movement 500
[ -z "$deepgemm$list" ] && echo "DeepGEMM is left out of the GEMMs; --deepgemm DIR names its compiled kernels"
gemms() { # name, layers
    part "kernels_gemm_$1" 530 python3 -m experiments.kernels.gemm --layers "${@:2}" --budget 500 \
        ${deepgemm:+--deepgemm "$deepgemm"} --out experiments/kernels/results.json
}
gemms 671b 0 1
gemms 16b 2 3
kernels ffn 500 --layers 0 2 1
kernels ffn_shared 300
kernels grouped_mm 250
kernels first_step 200
kernels routed_vs_fused_bf16 530 --budget 450
kernels model_layers 530 --budget 400
# Its autotuner compiles for ten minutes with an empty cache: after a timeout call the part again.
if [ -n "$list" ] || python3 -c "import sonicmoe" 2>/dev/null; then
    kernels sonicmoe 530 --budget 450
else
    echo "SonicMoE is not installed and left out; kernels/sonicmoe.py names its packages"
fi
if [ -n "$list" ] || python3 -c "import transformer_engine.pytorch" 2>/dev/null; then
    kernels transformer_engine 530 --budget 300
else
    echo "TransformerEngine is not installed and left out; kernels/transformer_engine.py names its packages and what to preload"
fi
part gemm_range 540 python3 -m experiments.gemm_range.run --out experiments/gemm_range --budget 500
part exchange 150 python3 -m experiments.expert_parallel.exchange --out experiments/expert_parallel/results.json
part transformers_qwen3 300 python3 -m experiments.transformers.run --out experiments/transformers --budget 200
part transformers_deepseek 300 python3 -m experiments.transformers.run --out experiments/transformers \
    --models deepseek_v3 --budget 200
part numerics 200 python3 -m experiments.numerics.layer --out experiments/numerics

part plots 60 bash -ec 'python3 -m experiments.throughput.plot experiments/throughput/results.json
    python3 -m experiments.gemm_range.plot experiments/gemm_range/results.json
    python3 -m experiments.headline experiments/throughput docs/headline.png
    python3 -m experiments.tables'
exit $failed
