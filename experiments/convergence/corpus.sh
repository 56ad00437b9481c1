#!/usr/bin/env bash
# Builds the text of pairs.sh from what this machine has: sources and documents of packages and of the system.
#
#     bash experiments/convergence/corpus.sh outputs/corpus60 [SITE_PACKAGES ...]   # also of these environments
#
# DIR/train.npy and DIR/validation.npy are the tokens, 16 bits each, DIR/tokens.json their numbers by source and by kind.
# DIR/part0.xz and so on are a tar of the three in parts of 58 MB. On another machine, which needs Python only:
#
#     cat DIR/part*.xz | python3 -c "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall('DIR')"
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out=$1
shift
sdk=/usr/lib/google-cloud-sdk/lib
torch=$(python3 -c "import torch; print(torch.__path__[0])")
environments=() inputs=()
for folder in "$@" /usr/lib/python3/dist-packages; do
    [ -d "$folder" ] && environments+=(--environment "$folder")
done
for folder in /usr/include "$torch/include" /usr/share/{doc,perl,vim} /usr/lib/node_modules $sdk/{third_party,surface,googlecloudsdk}; do
    [ -d "$folder" ] && inputs+=(--input "$folder")
done
python3 tools/build_corpus.py --out "$out" --packages all "${environments[@]}" "${inputs[@]}" --vocab-size 8192 \
    --suffixes .py .pyi .h .hpp .hh .c .cc .cpp .cu .cuh .inl .tcc .inc .def .td .js .pm .pl .pod .vim .cmake .sh .md .rst .txt \
    --held-out-fraction 0.03 --max-bytes "${MAX_BYTES:-300000000}"
python3 -m experiments.convergence.data "$out"
rm -f "$out"/part*.xz
tar -C "$out" -c train.npy validation.npy tokens.json | xz -T0 -6 | split -b 58000000 -d -a 1 --additional-suffix=.xz - "$out/part"
ls -l "$out"/part*.xz
