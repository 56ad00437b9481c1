"""Says what works on this machine: ``python -m titan_fp8moe.doctor``.

Prints versions and GPU, and compares every kernel with the specification (:func:`titan_fp8moe.self_check`). A bug
report needs this output. Exits with 1 if kernels differ. The dry run's ``--measure`` times a job's layers.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from triton import knobs

from titan_fp8moe import __version__
from titan_fp8moe.ops import self_check
from titan_fp8moe.versions import installed

SETTINGS = ("CUDA_", "NCCL_", "TORCH", "TRITON_", "PYTORCH_")


def main() -> int:
    gpus = torch.cuda.device_count()
    packages = {name: installed(name) for name in ("torch", "triton", "torchtitan", "torchao")}
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda} | packages
    print(f"titan_fp8moe {__version__} (commit {_commit()})")
    print(f"versions     {', '.join(f'{name} {version}' for name, version in versions.items() if version)}")
    print(f"hardware     {f'{gpus} x {torch.cuda.get_device_name()}' if gpus else f'CPU ({platform.machine()})'}")
    print(f"ptxas        {_ptxas()}")
    settings = (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS))
    print(f"environment  {' '.join(settings) or '-'}")
    if not torch.cuda.is_available():
        built = "is built for CUDA, but its driver finds no GPU" if torch.version.cuda else "is built without CUDA"
        print(f"kernels      not run: PyTorch {built}. Layers run the slow reference on the CPU")
        return 0
    where = self_check.combination()
    (major, minor), torch_version, triton_version = where
    tested = "the tests have run on" if where in self_check.TESTED else "NOT among those that the tests have run on:"
    print(f"combination  {tested} compute capability {major}.{minor}, PyTorch {torch_version}, Triton {triton_version}")
    if reason := self_check.why_no_kernels():
        print(f"kernels      not run: {reason}")
        return 1
    wrong = self_check.self_check()
    print(f"kernels      {'differ: ' + ', '.join(wrong) if wrong else 'agree with the specification'}")
    return 1 if wrong else 0


def _commit() -> str:
    """The checkout's short commit, with "+" if files differ from it."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return "unknown"
    describe = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip()


def _ptxas() -> str:
    """The assembler of Triton's kernels on GPUs before Blackwell. ``TRITON_PTXAS_PATH`` replaces Triton's own."""
    try:
        tool = knobs.nvidia.ptxas
    except RuntimeError as error:  # there is none
        return str(error)
    own = Path(tool.path).is_relative_to(Path(knobs.__file__).parent)
    return f"{tool.version}, {'of Triton' if own else tool.path}"


if __name__ == "__main__":
    sys.exit(main())
