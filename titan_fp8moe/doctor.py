"""Says what works on this machine: ``python -m titan_fp8moe.doctor``.

Prints versions and GPU, compares every kernel with the specification (:func:`titan_fp8moe.self_check`), and measures a
copy, a GEMM and a layer. A bug report needs this output. Exits with 1 if kernels differ.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import cast

import torch
import triton.testing
from triton import knobs

from titan_fp8moe import __version__, ops, recipe, routed_experts
from titan_fp8moe.ops import self_check
from titan_fp8moe.versions import installed

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 4096, 2048, 1408, 64, 6  # of DeepSeek-V3 16B's layers
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
    if wrong:
        return 1
    with ops.backend.open_gate():
        for name, value in measure().items():
            print(f"{name:12} {value}")
    return 0


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


def measure() -> dict[str, str]:
    """The rates of the best run of each, with nothing of its operands in L2."""
    shapes = (TOKENS, DIM), (EXPERTS, HIDDEN, DIM), (EXPERTS, DIM, HIDDEN), (EXPERTS, HIDDEN, DIM)
    leaves = [0.05 * torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    scores, ids = torch.rand(TOKENS, EXPERTS, dtype=torch.float32, device="cuda").topk(TOP_K)
    leaves = [t.requires_grad_() for t in (*leaves, scores)]
    rows = TOKENS * TOP_K // 128 * 128
    offsets_E = torch.full((1,), rows, dtype=torch.int32, device="cuda")
    a, a_scale = ops.quantize_rows(torch.randn(rows, DIM, dtype=torch.float32, device="cuda"))
    b = ops.quantize_weight(torch.randn(1, 2 * HIDDEN, DIM, dtype=torch.float32, device="cuda"))
    source, target = torch.empty(2, 2**28, dtype=torch.uint8, device="cuda")

    def layer() -> None:
        x, w1, w2, w3, scores = leaves
        out = routed_experts(x, w1, w2, w3, ids, scores)
        torch.autograd.grad(out, leaves, out.detach())

    a_scale = recipe.column_major(a_scale)
    runs = (
        lambda: target.copy_(source),
        lambda: ops.grouped_mm(a, a_scale, *b, offsets_E, torch.bfloat16),
        layer,
    )
    copy, gemm, whole = (cast(float, triton.testing.do_bench(run, return_mode="min")) for run in runs)
    return rates(source.numel(), copy, rows, gemm, whole)


def rates(copied_bytes: int, copy_ms: float, rows: int, gemm_ms: float, layer_ms: float) -> dict[str, str]:
    """The rates of :func:`measure`: bytes read and written, and products of GEMM 1 with one expert."""
    flops = 2 * rows * DIM * 2 * HIDDEN
    shape = f"{TOKENS} tokens, {EXPERTS} experts, top {TOP_K}, dims {DIM} and {HIDDEN}"
    return {
        "copy": f"{2 * copied_bytes / copy_ms / 1e9:.2f} TB/s",
        "GEMM": f"{flops / gemm_ms / 1e9:,.0f} TFLOPS ({rows} x {2 * HIDDEN} x {DIM})",
        "layer": f"{layer_ms:.2f} ms forward and backward ({shape})",
    }


if __name__ == "__main__":
    sys.exit(main())
