# Sourced under `set -o pipefail` by the other scripts, with the modules that they need: leaves a Python that has these
# modules, this package and its dependencies first on the PATH.
#
# That is the current environment if it has them all, else .venv, one for all scripts: this script creates it (a minute or
# two) and completes it. An environment of somebody's own that has torchtitan, or is .venv, it uses and leaves untouched;
# if modules are missing there, it names them and the extras that bring them.
#
# With torchtitan=0.3.0 set, the environment is one with that release, and its folder .venv03: the releases exclude each
# other.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

torchtitan=${torchtitan:-0.2.2}
case $torchtitan in
    0.2.2)
        venv=.venv torch=2.13.0 extras=torchtitan,dev own="torchao tomli"
        if command -v nvidia-smi >/dev/null; then torch=2.11.0; fi # on GPUs tested with Triton 3.6, which it brings
        ;;
    0.3.0) venv=.venv03 torch=2.14.1 extras=torchtitan03 own=spmd_types ;;
esac

alive() {  # name: passes output on, and adds a line in ten silent seconds
    python3 tools/progress.py "$1"
}

lacking() {  # modules: prints those that python3 does not find, and torchtitan where it is another release
    python3 - "$torchtitan" "$@" <<'EOF'
import sys
from importlib.metadata import version
from importlib.util import find_spec

_, release, *modules = sys.argv
lacking = [module for module in modules if not find_spec(module)]
if "torchtitan" not in lacking and version("torchtitan") != release:
    lacking.append(f"torchtitan=={release}")
print(*lacking)
EOF
}

modules="torch triton torchtitan torchdata datasets tokenizers tyro wandb $own $*"
if [ -n "$(lacking $modules)" ]; then
    [ -e $venv/begun ] || [ ! -e $venv/bin/activate ] || . $venv/bin/activate
    missing=$(lacking $modules)
    if [ -n "$missing" ] && [ ! -e $venv/begun ] && { [ -d $venv ] || [ -z "$(lacking torchtitan)" ]; }; then
        echo "error: $(command -v python3) lacks $missing; run in it: pip install -e '.[$extras]'" >&2
        exit 2
    fi
fi
if [ -n "$(lacking $modules)" ]; then
    if [ ! -e $venv/complete ]; then
        rm -rf $venv
        mkdir $venv
        touch $venv/begun
        python3 -m venv $venv
    fi
    . $venv/bin/activate
    if [ ! -e $venv/complete ] || [ -n "$(lacking $modules)" ]; then
        echo "Installing into $venv ..."
        # CPU builds of torch leave Triton's version open. run_environments.sh tests the newest.
        pip="python -m pip install --quiet --disable-pip-version-check"
        $pip "torch==$torch" "triton<3.9" 2>&1 | alive "installing torch $torch"
        $pip -e ".[$extras]" 2>&1 | alive "installing the rest"
        touch $venv/complete
    fi
fi
