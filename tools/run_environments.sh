#!/usr/bin/env bash
# Runs the tests with each pair of torch and Triton below, oldest first, then those of torchtitan 0.3. A pair has a virtual
# environment of its own, .venvs/torch..., of up to 7 GB, which its first run creates. Arguments go to pytest: --co -q checks
# in a minute per environment that all tests can be imported. Prints one line per environment; .venvs/*.log hold the rest.
# ONLY=2.15.0 runs the pair with that torch, ONLY=torchtitan0.3 the tests of 0.3.
set -uo pipefail
cd "$(dirname "$0")/.."

PAIRS=("2.11.0 3.6.0 numpy<2.4" "2.13.0 3.7.1" "2.14.1 3.8.0" "2.15.0 3.9.0")  # torch, Triton, other requirements

create() {  # folder, requirements
    [ -e "$1/complete" ] && return
    python3 -m venv --clear "$1" && "$1/bin/python" -m pip install "${@:2}" &&
        "$1/bin/python" -m pip install "${@:2}" -e '.[torchtitan,dev]' && touch "$1/complete"
}

in_pair() {  # folder, pytest's arguments
    (. "$1/bin/activate" && ./tools/run_tests.sh "${@:2}")
}

failed=0
run() {  # name, command
    local result=passed
    "${@:2}" >".venvs/$1.log" 2>&1 || { result=FAILED && failed=1; }
    echo "$1: $result; $(grep -E '^(=+ )?[0-9]+ .* in [0-9.]+s' ".venvs/$1.log" | tr -d = | paste -sd ';')"
}

mkdir -p .venvs
for pair in "${PAIRS[@]}"; do
    [[ $pair = ${ONLY-}* ]] || continue
    read -r torch triton others <<<"$pair"
    name=torch$torch-triton$triton
    if create ".venvs/$name" "torch==$torch" "triton==$triton" ${others:+"$others"} >".venvs/$name.log" 2>&1; then
        run "$name" in_pair ".venvs/$name" "$@"
    else
        echo "$name: FAILED to install; see .venvs/$name.log" && failed=1
    fi
done
[[ torchtitan0.3 = ${ONLY-}* ]] && run torchtitan0.3 ./tools/run_tests.sh --torchtitan03 "$@"
exit $failed
