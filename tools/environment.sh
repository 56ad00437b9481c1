# Sourced by the other scripts: leaves a Python with this package and its dependencies first on the PATH. An environment
# that already has them is used as it is; otherwise one is made in .venv, which takes a minute or two once.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -f .venv/complete ]; then
    . .venv/bin/activate
elif ! python3 -c "import torch, triton, torchtitan, torchao, datasets, tyro, pytest, hypothesis" 2>/dev/null; then
    echo "Setting up .venv ..."
    rm -rf .venv
    python3 -m venv .venv
    . .venv/bin/activate
    python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
    python -m pip install --quiet --disable-pip-version-check -e ".[test]"
    touch .venv/complete
fi
