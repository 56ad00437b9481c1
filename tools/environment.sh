# Sourced by the other scripts, with the modules that they need: leaves a Python that has these modules, this package and
# its dependencies first on the PATH.
#
# That is the current environment if it has them all. Otherwise it is .venv, which this script creates (a minute or two)
# and completes when modules are missing. A .venv that this script did not create is left untouched.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

lacking() {  # modules: prints those that python3 does not find
    python3 -c "import sys; from importlib.util import find_spec; print(*[m for m in sys.argv[1:] if not find_spec(m)])" "$@"
}

modules="torch triton torchtitan torchao torchdata datasets tokenizers tyro tomli wandb $*"
if [ -n "$(lacking $modules)" ]; then
    if [ -d .venv ] && [ ! -e .venv/begun ]; then
        echo "This Python lacks $(lacking $modules), and tools/environment.sh did not create the .venv that exists." >&2
        echo "Activate an environment and run: pip install -e '.[torchtitan,dev]'" >&2
        exit 2
    fi
    if [ ! -e .venv/complete ]; then
        rm -rf .venv
        mkdir .venv
        touch .venv/begun
        python3 -m venv .venv
    fi
    . .venv/bin/activate
    if [ ! -e .venv/complete ] || [ -n "$(lacking $modules)" ]; then
        echo "Installing into .venv ..."
        python -m pip install --disable-pip-version-check "torch==2.13.0"
        python -m pip install --disable-pip-version-check -e ".[torchtitan,dev]"
        touch .venv/complete
    fi
fi
