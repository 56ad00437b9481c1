#!/usr/bin/env bash
# Lints, checks spelling and types, then runs all tests that this machine can run. Arguments go to pytest; --slow adds the
# tests marked slow.
#
# With --torchtitan03 as the first argument it runs the tests of the adapter for torchtitan 0.3 only, in an environment of
# their own, .venv03.
set -euo pipefail

[ -t 1 ] && export PY_COLORS=1  # pytest writes into a pipe
echo "This takes ten minutes on two idle cores. It writes .venv (2.7 GB, with CUDA 7 GB), caches of tools, and temporary files."
tests() {  # pytest's arguments
    PYTHONUNBUFFERED=1 python3 -m pytest "$@" 2>&1 | alive tests
}

if [ "${1-}" = --torchtitan03 ]; then
    shift
    torchtitan=0.3.0
    . "$(dirname "$0")/environment.sh" pytest pytest_timeout tensorboard
    export OMP_NUM_THREADS=1
    tests tests/torchtitan03 tests/test_titan_jobs.py "$@"
    exit
fi
. "$(dirname "$0")/environment.sh" matplotlib tensorboard accelerate codespell_lib hypothesis peft pyrefly pytest \
    pytest_timeout ruff setuptools transformers xdist

python3 -m ruff check .
python3 -m ruff format --check .
python3 -m codespell_lib 2>&1 | alive codespell
python3 -m pyrefly check 2>&1 | alive "pyrefly check"
if python3 -c "import torch; raise SystemExit(not torch.cuda.is_available())" | alive "looking for a GPU"; then
    tests tests "$@"
    exit
fi
# Threads of several processes would fight for the cores.
export OMP_NUM_THREADS=1
# Triton decides at import whether kernels are interpreted, so the kernel tests run in processes of their own.
TRITON_INTERPRET=1 tests tests/kernels -n 2 "$@"
# A worker takes a file at a time in the order of collection, in which tests/conftest.py puts the longest first. Processes
# of tests/distributed wait for each other a third of the time, in which the other worker has the cores.
tests tests --ignore tests/kernels -n 2 --dist loadfile --no-loadscope-reorder "$@"
