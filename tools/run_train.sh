#!/usr/bin/env bash
# Train with torchtitan, in the manner of torchtitan's own run_train.sh. Run it from the root of this repository:
#
#     NGPU=8 CONFIG_FILE=train_configs/deepseek_v3_16b.toml ./tools/run_train.sh --training.steps 100
#
# NGPU            processes on this node, one per GPU; without a GPU, CPU processes over gloo
# CONFIG_FILE     the TOML file; every setting in it can be overridden on the command line
# LOG_RANK        comma-separated local ranks whose output is shown
# NNODES          nodes; start the script on each of them, with RDZV_ENDPOINT=<host of one of them>:<port>
#
# If it fails, its last line is the error of a rank.
set -e

NGPU=${NGPU:-1}
CONFIG_FILE=${CONFIG_FILE:-train_configs/debug.toml}
if [ ! -f "$CONFIG_FILE" ]; then
    echo "error: CONFIG_FILE = $CONFIG_FILE: no such file; train_configs/ has some" >&2
    exit 2
fi
if [ -n "${COMM_MODE:-}" ]; then
    echo "error: COMM_MODE = $COMM_MODE does nothing here; to check a job without its GPUs run: python3 -m" \
        "titan_fp8moe.torchtitan.dry_run $CONFIG_FILE --world-size $NGPU" >&2
    exit 2
fi
if [ -n "${TRAIN_FILE:-}" ]; then
    echo "error: TRAIN_FILE = $TRAIN_FILE does nothing here; start that module with torchrun" >&2
    exit 2
fi
if ! python3 -c "import importlib.util as util; raise SystemExit(not util.find_spec('torchtitan'))"; then
    echo "error: $(command -v python3) lacks torchtitan; activate its environment, such as: source .venv/bin/activate" >&2
    exit 2
fi
python3 - "$CONFIG_FILE" "$@" <<'CHECKS'
import pathlib, sys, tomllib
tables = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
job = {f"{table}.{name}": value for table, values in tables.items() for name, value in values.items()}
words = [word for argument in sys.argv[2:] for word in argument.split("=", 1)]
job |= {word[2:].replace("-", "_"): value for word, value in zip(words, words[1:]) if word.startswith("--")}
assets, data = (pathlib.Path(job.get(name) or "") for name in ("model.hf_assets_path", "training.dataset_path"))
converters = job.get("model.converters", "")
if ("fp8_flow_moe" in converters or "fp8_flow_moe" in tables) and not job.get("job.custom_config_module"):
    sys.exit('error: fp8_flow_moe is unknown to torchtitan; set job.custom_config_module = "titan_fp8moe.torchtitan"')
if "fp8_flow_moe" in tables and "fp8_flow_moe" not in converters:
    print("note: model.converters has no fp8_flow_moe, so the table [fp8_flow_moe] has no effect", file=sys.stderr)
if "fp8_flow_moe" in converters and "quantize.grouped_mm" in str(converters):
    sys.exit("error: model.converters has fp8_flow_moe and quantize.grouped_mm, which convert the same experts; keep one")
if not any((assets / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
    sys.exit(f"error: model.hf_assets_path = {str(assets)!r} has no tokenizer.json; download it, or make one with a"
             " corpus: tools/build_corpus.py")
if (job.get("training.dataset") == "c4_test" or data.is_absolute()) and not data.exists():
    sys.exit(f"error: training.dataset_path = {str(data)!r} does not exist; tools/build_corpus.py makes a corpus")
CHECKS
LOG_RANK=${LOG_RANK:-0}
NNODES=${NNODES:-1}
RDZV_ENDPOINT=${RDZV_ENDPOINT:-localhost:0}

export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
if [ "${CUDA_VISIBLE_DEVICES-unset}" = "" ] || ! nvidia-smi -L >/dev/null 2>&1; then
    # A second thread per process waits for a core that others have, and FP8 becomes several times slower than bf16.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
set -x
exec python3 tools/launch.py torchrun --nnodes="${NNODES}" --nproc_per_node="${NGPU}" \
    --rdzv_backend=c10d --rdzv_endpoint="${RDZV_ENDPOINT}" \
    --local-ranks-filter="${LOG_RANK}" --role=rank --tee=3 \
    -m torchtitan.train --job.config_file="${CONFIG_FILE}" "$@"
