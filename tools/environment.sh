# Sourced by the other scripts with the modules that they need: leaves a Python that has them, with this package and its
# dependencies, first on the PATH. The current environment if it has them all; otherwise .venv, which is made if there
# is none and takes a minute or two once. A .venv that was made by somebody else is never touched.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

lacking() {  # modules: prints those that python3 does not find
    python3 -c "import sys; from importlib.util import find_spec; print(*[m for m in sys.argv[1:] if not find_spec(m)])" "$@"
}

modules="torch triton torchtitan torchao torchdata datasets tokenizers tyro tomli wandb $*"
if [ -n "$(lacking $modules)" ]; then
    if [ -d .venv ] && [ ! -e .venv/begun ] && [ ! -e .venv/complete ]; then
        echo "This Python lacks $(lacking $modules), and there is a .venv that was not made here." >&2
        echo "Activate an environment and run: pip install -e '.[test]'" >&2
        exit 2
    fi
    if [ -e .venv/complete ]; then
        . .venv/bin/activate
    else
        echo "Setting up .venv ..."
        rm -rf .venv
        mkdir .venv
        touch .venv/begun
        python3 -m venv .venv
        . .venv/bin/activate
        python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
        python -m pip install --quiet --disable-pip-version-check -e ".[test]"
        touch .venv/complete
    fi
fi
